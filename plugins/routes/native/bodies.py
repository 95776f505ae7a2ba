"""The bodies of the native batch endpoints."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("a number is wanted, not true or false")
    return value


Text = Annotated[str, Field(min_length=1)]
Integer = Annotated[int, BeforeValidator(_no_bool)]
Positive = Annotated[int, Field(ge=1), BeforeValidator(_no_bool)]
MAX_STOPS = 64


class GenerationBody(BaseModel):
    """Fields that every native generation shares; the sampler checks its own fields itself.

    `temperature`, `top_k`, `top_p`, `alpha_presence`, `alpha_frequency` and `alpha_decay` are described here for
    /openapi.json; which of them count depends on the sampler.
    """

    model: str = Field("rwkv7", description="a label, echoed; never switches the model")
    max_tokens: Positive | None = Field(None, description="most tokens per row")
    stop_tokens: list[Text] | None = Field(
        None, max_length=MAX_STOPS, description="stop texts; they may span tokens and are never part of the output"
    )
    sampler: str | None = Field(None, description="a registered sampler's name; the path has a default")
    temperature: Any = Field(None, description="0 to 1000; 0 is greedy")
    top_k: Any = Field(None, description="any integer; 0 or less: no bound")
    top_p: Any = Field(None, description="0 to 1; 0 is greedy")
    alpha_presence: Any = Field(None, description="penalty of tokens that have been drawn")
    alpha_frequency: Any = Field(None, description="penalty per time a token was drawn")
    alpha_decay: Any = Field(None, description="0 to 1: what remains of a penalty after each token")
    stream: bool = False
    chunk_size: Positive = Field(4, description="tokens gathered before a row is flushed")
    seed: Integer | None = Field(None, description="same seed, same text; random when absent")
    state: Text | None = Field(None, description="a state-tuning file in --state-dir to begin from")
    use_prefix_cache: bool = Field(True, description="false: read the whole prompt, and keep nothing of it")


class BatchBody(GenerationBody):
    contents: list[Text] = Field(min_length=1, description="the prompts; choices come back by position")
