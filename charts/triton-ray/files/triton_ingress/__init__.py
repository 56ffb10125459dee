"""What stands between Ray Serve and HAProxy: it gives Ray's HAProxy the way straight to Triton, and guards the ports.

Ray starts the program `haproxy` of this folder in HAProxy's place (RAY_SERVE_HAPROXY_BINARY_PATH). Only the standard
library is imported: it runs with each change of the replicas.
"""
