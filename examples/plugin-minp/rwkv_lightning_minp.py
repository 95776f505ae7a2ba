"""A min-p sampler and an endpoint of its own: what a third-party distribution for rwkv-lightning looks like.

Min-p keeps the tokens whose probability is at least min_p times that of the likeliest one, and draws among them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from fastapi import APIRouter, Depends
from pydantic import BaseModel, Field
from starlette.responses import JSONResponse, Response

from rwkv_lightning.core.errors import InvalidField
from rwkv_lightning.core.generation import new_request, sampling_params, validate
from rwkv_lightning.core.hookspecs import hookimpl
from rwkv_lightning.core.http import Call, body_in_openapi, collect, read_call, unless_client_leaves
from rwkv_lightning.core.interfaces import RouteGroup
from rwkv_lightning.core.rendering import render_openai

LIMITS = {"min_p": 1.0, "temperature": 1000.0}


class Section(BaseModel):
    """`[plugins.minp]`: what a request gets that names no min_p of its own."""

    min_p: float = Field(0.1, ge=0, le=1)


@dataclass(frozen=True, slots=True)
class Options:
    min_p: float
    temperature: float

    @property
    def greedy(self) -> bool:
        return self.temperature < 0.001


class Row:
    """A row's random stream: numbers depend on the seed, the row and the position alone."""

    def __init__(self, options: Options, seed: int, row: int) -> None:
        self.options = options
        self.stream = np.random.Generator(np.random.Philox(key=seed + (row << 64)))

    def point(self, total: float) -> float:
        """Where in 0 .. total the draw falls; a bad row (0) does not advance, a greedy one takes its first token."""
        return 0.0 if self.options.greedy or not total else float(self.stream.random()) * total


class MinP:
    def __init__(self, default_min_p: float = 0.1) -> None:
        self.defaults: dict[str, Any] = {"min_p": default_min_p, "temperature": 1.0}

    def validate(self, values: Mapping[str, Any]) -> Options:
        return Options(**{name: number(name, values.get(name, self.defaults[name])) for name in LIMITS})

    def open(self, options: Options, seed: int, row: int) -> Row:
        return Row(options, seed, row)

    def sample(self, logits: torch.Tensor, rows: Sequence[Row]) -> list[int]:
        """All rows at once: weights [R, V], and the first token whose running sum exceeds the drawn number."""
        options = [row.options for row in rows]
        temperature = logits.new_tensor([1.0 if o.greedy else o.temperature for o in options], dtype=torch.float64)
        floor = logits.new_tensor([1.0 if o.greedy else o.min_p for o in options], dtype=torch.float64).log()
        scaled = logits.double() / temperature[:, None]
        scaled -= scaled.amax(-1, keepdim=True)
        sums = scaled.exp().where(scaled >= floor[:, None], 0.0).cumsum(-1)
        totals = sums[:, -1].tolist()  # 0 where a row holds NaN, or nothing finite
        points = [row.point(total) for row, total in zip(rows, totals, strict=True)]
        drawn = torch.searchsorted(sums, sums.new_tensor(points)[:, None], right=True)[:, 0].tolist()
        return [token if total else -1 for token, total in zip(drawn, totals, strict=True)]


def number(name: str, value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value <= LIMITS[name]:
        raise InvalidField(f"{name} must be a number from 0 to {LIMITS[name]:g}", param=name)
    return float(value)


class Body(BaseModel):
    """POST /minp/completions; the sampler checks its own two fields."""

    prompt: str = Field(min_length=1)
    max_tokens: int = Field(64, ge=1, strict=True)
    seed: int | None = Field(None, strict=True)
    min_p: Any = Field(None, description="0 to 1")
    temperature: Any = Field(None, description="0 to 1000; 0 is greedy")


router = APIRouter(tags=["minp"])


@router.post("/minp/completions", openapi_extra=body_in_openapi(Body.model_json_schema()))
async def completions(call: Annotated[Call, Depends(read_call)]) -> Response:
    """Complete one prompt."""
    body = validate(Body, call.body)
    model = call.context.models.default
    params = sampling_params(
        model.engine,
        call.context.settings,
        sampler="min-p",
        values=body.model_dump(include=set(LIMITS), exclude_none=True),
        max_tokens=body.max_tokens,
        seed=body.seed,
    )
    with model.engine.submit(new_request(await model.encode([body.prompt]), params)) as stream:
        (event,) = await unless_client_leaves(call.request, collect(stream))
    return JSONResponse({"text": event.text, "finish_reason": event.finish_reason})


@hookimpl
def plugin_settings() -> type[BaseModel]:
    return Section


@hookimpl
def register_samplers(register: Any, section: Section) -> None:
    register("min-p", lambda context: MinP(section.min_p), "keeps tokens at least min_p times as likely as the best")


@hookimpl
def register_routes(register: Any) -> None:
    register(RouteGroup("minp", router, render_openai, validation_status=400, prefixes=("/minp",)))
