"""POST /FIM/v1/batch-FIM: fill in the middle of prefix/suffix pairs."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from rwkv_lightning.core.errors import InvalidField
from rwkv_lightning.core.generation import check_rows, validate
from rwkv_lightning.core.http import body_in_openapi
from rwkv_lightning.core.text.fim import fim_prompt
from rwkv_lightning.plugins.routes import defaults
from rwkv_lightning.plugins.routes.native.batch import Form, PostCall, complete
from rwkv_lightning.plugins.routes.native.bodies import GenerationBody

router = APIRouter(tags=["native"])

FORM = Form("rwkv7-batch", "FIM.completion", defaults.FIM, without_effect=frozenset({"stop_tokens"}))


class FimBody(GenerationBody):
    prefix: list[str] = Field(min_length=1, description="what comes before each gap")
    suffix: list[str] = Field(min_length=1, description="what comes after each gap; as many as prefixes")


@router.post("/FIM/v1/batch-FIM", openapi_extra=body_in_openapi(FimBody.model_json_schema()))
async def batch_fim(call: PostCall) -> Response:
    """Fill each gap; an answer ends with end-of-text, stop texts do not apply."""
    body = validate(FimBody, call.body)
    if len(body.prefix) != len(body.suffix):
        raise InvalidField(
            f"suffix: {len(body.prefix)} prefixes and {len(body.suffix)} suffixes; send as many of one as of the other",
            param="suffix",
        )
    check_rows(len(body.prefix), call.context.settings)
    prompts = [fim_prompt(prefix, suffix) for prefix, suffix in zip(body.prefix, body.suffix, strict=True)]
    return await complete(call, body.model_copy(update={"stop_tokens": []}), prompts, FORM)
