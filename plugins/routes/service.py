"""The service route group: health for probes and metrics for Prometheus (service_rules.md section 5)."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Depends, Request
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import JSONResponse, Response

from rwkv_lightning.core.hookspecs import hookimpl
from rwkv_lightning.core.http import context_of, require_password_if_protect_all
from rwkv_lightning.core.interfaces import RouteGroup, ServerContext
from rwkv_lightning.core.rendering import render_openai

router = APIRouter(tags=["service"])


@router.get("/v1/health")
async def health(request: Request) -> Response:
    """Whether the server can serve; never asks for a password. 503 when the engine has stopped or a plugin says no.

    `degraded` is served with 200: the state store fails, and sessions go on from RAM.
    """
    report = health_report(context_of(request))
    return JSONResponse(report, 200 if report["status"] in ("ok", "degraded") else 503)


@router.get("/metrics", dependencies=[Depends(require_password_if_protect_all)])
async def metrics(request: Request) -> Response:
    """Prometheus metrics."""
    return Response(generate_latest(context_of(request).metrics.registry), media_type=CONTENT_TYPE_LATEST)


def health_report(context: ServerContext) -> dict[str, Any]:
    """The fields of GET /v1/health; asks no device."""
    model = context.models.default
    scheduler = model.engine.scheduler
    alive = model.engine.alive
    not_ready = context.host.readiness_checks(context)
    states = model.engine.states
    degraded = states is not None and states.failure is not None
    report = {
        "status": "engine stopped" if not alive else "not ready" if not_ready else "degraded" if degraded else "ok",
        "state_store": "none" if states is None else states.store_state,
        "model_loaded": alive,
        "model": model.name,
        "gpu_memory_used_gb": gpu_memory_used(model.model.device),
        "uptime_seconds": int(time.monotonic() - context.started),
        "success_rate_1m": context.metrics.outcomes.rate(),
        "queue_depth": scheduler.num_waiting + scheduler.num_swapped,
        "running": scheduler.num_running,
    }
    if states is not None and degraded:
        report["state_store_failure"] = states.failure
    return {**report, "not_ready": not_ready} if not_ready else report


def gpu_memory_used(device: str) -> float | None:
    """Gigabytes that torch has reserved on the device (its own bookkeeping, no device call); None without a GPU."""
    if device.startswith("cpu"):
        return None
    import torch

    return round(torch.cuda.memory_reserved(device) / 1e9, 1)


@hookimpl
def register_routes(register) -> None:  # type: ignore[no-untyped-def]
    register(RouteGroup(name="service", router=router, render_error=render_openai))
