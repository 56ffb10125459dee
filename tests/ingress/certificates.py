"""Certificates and signed tokens, made by the tests for themselves."""

import base64
import datetime as dt
import ipaddress
import json
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa, utils
from cryptography.x509.oid import NameOID

_CURVES: dict[str, ec.EllipticCurve] = {"ES256": ec.SECP256R1(), "ES384": ec.SECP384R1(), "ES512": ec.SECP521R1()}
_DIGESTS: dict[str, hashes.HashAlgorithm] = {"256": hashes.SHA256(), "384": hashes.SHA384(), "512": hashes.SHA512()}
_HOUR = dt.timedelta(hours=1)


class Authority:
    """One that signs certificates, for an hour."""

    def __init__(self, name: str) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._certificate = (
            self._builder(self._name, self._key)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )

    @property
    def pem(self) -> bytes:
        """Its own certificate."""
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    def issue(self, address: str) -> bytes:
        """Return a certificate for an IP address, and its key, in one PEM text."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, address)])
        names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
        certificate = self._builder(name, key).add_extension(names, critical=False).sign(self._key, hashes.SHA256())
        return certificate.public_bytes(serialization.Encoding.PEM) + private_pem(key)

    def _builder(self, name: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = dt.datetime.now(dt.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _HOUR)
            .not_valid_after(now + _HOUR)
        )


def private_pem(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> bytes:
    """Return a private key as PEM."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


class Signer:
    """Signs JWTs with one key."""

    def __init__(self, algorithm: str) -> None:
        self.algorithm = algorithm
        self._key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey
        if algorithm.startswith("ES"):
            self._key = ec.generate_private_key(_CURVES[algorithm])
        else:
            self._key = rsa.generate_private_key(65537, 2048)

    def write_public_key(self, file: Path) -> Path:
        """Write the public key as PEM; return the file."""
        file.write_bytes(
            self._key.public_key().public_bytes(
                serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
            )
        )
        return file

    def token(self, claims: Any, *, algorithm: str | None = None) -> str:
        """Return a JWT with these claims; `algorithm` is what its header says, by default the truth."""
        header = {"typ": "JWT", "alg": algorithm or self.algorithm}
        signed = ".".join(_base64(json.dumps(part).encode()) for part in (header, claims))
        return f"{signed}.{_base64(self._sign(signed.encode()))}"

    def _sign(self, text: bytes) -> bytes:
        digest = _DIGESTS[self.algorithm[2:]]
        if isinstance(self._key, ec.EllipticCurvePrivateKey):
            size = (self._key.key_size + 7) // 8
            r, s = utils.decode_dss_signature(self._key.sign(text, ec.ECDSA(digest)))
            return r.to_bytes(size, "big") + s.to_bytes(size, "big")
        if self.algorithm.startswith("PS"):
            return self._key.sign(text, padding.PSS(padding.MGF1(digest), digest.digest_size), digest)
        return self._key.sign(text, padding.PKCS1v15(), digest)


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
