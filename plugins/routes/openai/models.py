"""GET /openai/v1/models and /v1/models/{id}: what can be served."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends, Request

from rwkv_lightning.core.http import context_of, require_password, require_password_if_protect_all

router = APIRouter(tags=["openai"])


@router.get("/openai/v1/models", dependencies=[Depends(require_password)])
async def list_models(request: Request) -> dict[str, Any]:
    """The loaded models and their aliases."""
    return {"object": "list", "data": context_of(request).models.cards()}


@router.get("/v1/models/{model_id:path}", dependencies=[Depends(require_password_if_protect_all)])
async def retrieve_model(request: Request, model_id: str) -> dict[str, Any]:
    """One model by name or alias, or 404."""
    return context_of(request).models.get(model_id).card(model_id)


@router.get("/openai/v1/models/{model_id:path}", dependencies=[Depends(require_password)])
async def retrieve_openai_model(request: Request, model_id: str) -> dict[str, Any]:
    """The same for clients with this base URL."""
    return await retrieve_model(request, model_id)
