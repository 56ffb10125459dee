"""The Serve application: what the Serve configuration imports."""

from typing import Any

from ray import serve

from triton_forwarder.fleet import Fleet
from triton_forwarder.forwarder import Forwarder
from triton_forwarder.settings import Settings


def build_app(args: dict[str, Any]) -> serve.Application:
    """Build the Serve application; `args` are those of the Serve configuration, see `Settings`."""
    settings = Settings.from_args(args)
    fleet = serve.deployment(
        name="Fleet",
        # On the head, where no replica that ends takes it along.
        ray_actor_options={"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}},
        max_ongoing_requests=1000,
        logging_config={"enable_access_log": False},
    )(Fleet)
    forwarder = serve.deployment(
        # Whatever the cluster, one replica belongs to one Triton.
        ray_actor_options={"num_cpus": 0, "resources": {"triton": 1}},
        # Triton has the queue; Serve's default of 5 would hold back its dynamic batcher.
        max_ongoing_requests=settings.max_ongoing_requests,
        # Those that wait for a first replica, or for one that has room: an end, so that the wait has one.
        max_queued_requests=settings.max_ongoing_requests,
        health_check_period_s=5,
        # Serve's own wait for its requests, and then ours for Triton's.
        graceful_shutdown_timeout_s=settings.drain_timeout_s + 30,
        # Two log lines for a call cost half of what carrying it does.
        logging_config={"enable_access_log": False},
        autoscaling_config={
            "min_replicas": settings.min_replicas,
            "max_replicas": settings.max_replicas,
            "target_ongoing_requests": settings.target_ongoing_requests,
            "upscale_delay_s": settings.upscale_delay_s,
            "downscale_delay_s": settings.downscale_delay_s,
            "policy": {"policy_function": "triton_forwarder.autoscaling:policy"},
        },
    )(serve.ingress()(Forwarder))
    return forwarder.bind(settings, fleet.bind())
