"""GET /v1/models: the loaded model, open unless --protect-all is set."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends, Request

from rwkv_lightning.core.http import context_of, require_password_if_protect_all

router = APIRouter(tags=["native"])


@router.get("/v1/models", dependencies=[Depends(require_password_if_protect_all)])
async def list_models(request: Request) -> dict[str, Any]:
    """The loaded models."""
    return {"object": "list", "data": context_of(request).models.cards()}
