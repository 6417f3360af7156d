"""The fields of requests that say how tokens are chosen, under OpenAI's, TabbyAPI's and llama.cpp's names, and what they mean here."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, GetJsonSchemaHandler, ValidationError, create_model, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from exl2nb.core.options import options_of
from exl2nb.generator.request import Request
from exl2nb.sampling.params import MAX_ID, MAX_SEED, SamplingParams
from exl2nb.server.error_responses import ApiError, invalid_request

MAX_TEXT = 1 << 20
Text = Annotated[str, Field(max_length=MAX_TEXT)]
Texts = Annotated[list[Text], Field(max_length=256)]
Ids = Annotated[list[Annotated[int, Field(ge=0, le=MAX_ID)]], Field(max_length=1 << 16)]
MAX_INPUTS = 256
Inputs = Text | Annotated[list[Text], Field(max_length=MAX_INPUTS)] | Ids | Annotated[list[Ids], Field(max_length=MAX_INPUTS)]
"""One or several texts, or their token ids."""


def named(*names: str, default: Any = None, description: str = "") -> Any:
    """A field that may also be given by other names."""
    return Field(default, validation_alias=AliasChoices(*names), description=description or "Also: " + ", ".join(names[1:]))


def no_effect(why: str = "") -> Any:
    """A field that may be given and changes nothing."""
    return Field(None, description=f"no effect: {why}" if why else "no effect")


class Body(BaseModel):
    """A request body.

    An unknown field is an error. A field that is given under two names with two values is an error. A field that is null has its default.
    """

    model_config = ConfigDict(extra="forbid", populate_by_name=True, allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _defaults_for_nulls(cls, given: Any) -> Any:
        """Leave out the fields that are null, and replace lone surrogates.

        OpenAI's specification makes nearly every field nullable, and clients that serialize a whole object send null for all unset fields.
        """
        if not isinstance(given, dict):
            return given
        fields = cls.model_fields
        required = {name for alias, name in own_names(cls).items() if fields[name].is_required()}
        try:
            return {name: with_valid_text(value) for name, value in given.items() if value is not None or name in required}
        except RecursionError:
            raise ValueError("is nested too deeply") from None

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Say in the OpenAPI document that a field with a default may be null."""
        made = handler(schema)
        whole = handler.resolve_ref_schema(made)
        required = whole.get("required", ())
        for name, one in whole.get("properties", {}).items():
            if name not in required and "type" in one and one["type"] != "null":
                about = {key: one.pop(key) for key in ("title", "description", "default") if key in one}
                whole["properties"][name] = {"anyOf": [one, {"type": "null"}], **about}
        return made

    @model_validator(mode="before")
    @classmethod
    def _one_name_each(cls, given: Any) -> Any:
        """Some clients send a value under the names of several servers at once."""
        if not isinstance(given, dict):
            return given
        own, first = own_names(cls), dict[str, str]()
        made = given
        for name, value in given.items():
            if (field := own.get(name)) is None or (kept := first.setdefault(field, name)) == name:
                continue
            if made is given:
                made = dict(given)
            if made[kept] is not None and value is not None and value != made[kept]:
                raise ValueError(f"{kept} and {name} are names of one field and differ; give one of them")
            del made[name]
            if made[kept] is None:
                made[kept] = value
        return made


class _WithoutEffect(Body):
    """Fields of other servers that may be given."""

    adaptive_decay: Any = no_effect()
    api_server: Any = no_effect()
    api_type: Any = no_effect()
    dynamic_temperature: Any = no_effect("give dynatemp_low and dynatemp_high")
    include_reasoning: Any = no_effect("it is always told apart")
    n_probs: Any = no_effect("give logprobs")
    num_ctx: Any = no_effect("the context belongs to the model")
    rep_pen_slope: Any = no_effect()
    spaces_between_special_tokens: Any = no_effect()


class _Off(Body):
    """Samplers of other servers that may be given switched off."""

    top_n_sigma: float | None = named("top_n_sigma", "nsigma", description="0 (off); more is refused")
    adaptive_target: float | None = Field(None, description="negative (off); more is refused")
    min_keep: int | None = Field(None, description="0 (off); more is refused")
    max_tokens_second: int | None = Field(None, description="0 (off); more is refused")


def _fields_of(*classes: type) -> dict[str, Any]:
    """A field for each number and switch that `option` declared, under its name and its aliases; None: it was not given."""
    return {
        name: (kind | None, named(name, *one.aliases) if one.aliases else None)
        for cls in classes
        for name, one in options_of(cls).items()
        if one.server and (kind := one.kind) is not None
    }


if TYPE_CHECKING:

    class _Numbers(_Off, _WithoutEffect):
        max_tokens: int | None

else:
    _Numbers = create_model("_Numbers", __base__=(_Off, _WithoutEffect), **_fields_of(Request, SamplingParams))


class Sampling(_Numbers):
    """Every sampler, field for field as `SamplingParams` and `Request`.

    A field that is not given has the default that the model recommends, else it is neutral.
    """

    stop: Text | Annotated[list[Text | int], Field(max_length=256)] | None = named(
        "stop", "stop_sequence", "stop_sequences", "stopping_strings"
    )
    dry_breakers: Text | Texts | None = named("dry_breakers", "dry_sequence_breakers")
    mirostat_mode: int | None = named("mirostat_mode", "mirostat")
    dynatemp_range: float | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=1 << 16)] | None = None
    banned_tokens: Ids | Text | None = named("banned_tokens", "custom_token_bans")
    allowed_tokens: Ids | Text | None = named("allowed_tokens", "allowed_token_ids")
    banned_strings: Text | Texts | None = None
    token_healing: bool | None = None
    ban_eos_token: bool | None = named("ban_eos_token", "ignore_eos")
    add_bos_token: bool | None = None
    negative_prompt: Text | None = None
    cfg_scale: float | None = named("cfg_scale", "guidance_scale")
    speculation: str | None = None
    speculative_ngram: bool | None = None
    json_schema: dict[str, Any] | Text | None = None
    regex_pattern: Text | None = named("regex_pattern", "regex")
    grammar_string: Text | None = named("grammar_string", "grammar")
    preset: str | None = Field(None, description="a sampler preset by name, instead of the server's own")
    cache_mode: str | None = Field(None, description="refused: the cache belongs to the model, not to a request")
    skip_special_tokens: bool | None = Field(None, description="true; false is refused")

    def generation_options(self) -> dict[str, Any]:
        """The options of `llm.generate` that these fields stand for; those that were not given are missing.

        Raises:
            ApiError: 400, a value that means nothing here.
        """
        given = {name: value for name in Sampling.model_fields if (value := getattr(self, name)) is not None and value != ""}
        refuse(given.pop("cache_mode", None), "cache_mode", "is chosen when the model is loaded, for all requests")
        if given.pop("skip_special_tokens", True) is False:
            refuse(False, "skip_special_tokens", "can only be true: special tokens have no text in an answer")
        for name in _Off.model_fields:
            if (value := given.pop(name, 0)) > 0:
                refuse(value, name, "is not offered; leave it out")
        for name in (*_WithoutEffect.model_fields, "preset", "add_bos_token"):  # the last two count elsewhere
            given.pop(name, None)
        for name in ("penalty_range", "dry_range", "seed"):
            if given.get(name) == -1:  # other servers: all of the text, any seed
                del given[name]
        if given.get("seed", 0) < 0:  # OpenAI's seeds are signed 64-bit integers
            given["seed"] %= MAX_SEED + 1
        allow_zero_top_p(given)
        if given.get("top_k") == -1:  # other servers: all of the vocabulary, whatever the model's default is
            given["top_k"] = 0
        if (mode := given.pop("mirostat_mode", 0)) not in (0, 2):
            refuse(mode, "mirostat_mode", "is not known; expected 0 (off) or 2")
        if mode == 2:
            given["mirostat"] = True
        else:
            for name in ("mirostat_tau", "mirostat_eta"):
                given.pop(name, None)
        _dynamic_temperature(given)
        for name in ("banned_tokens", "allowed_tokens"):
            if name in given:
                given[name] = _ids(name, given[name])
                if not given[name]:
                    del given[name]
        for name in ("stop", "banned_strings"):
            if isinstance(given.get(name), list):
                given[name] = [one for one in given[name] if one != ""]
        if "dry_breakers" in given:
            given["dry_breakers"] = _breakers(given["dry_breakers"])
        if "logit_bias" in given:
            given["logit_bias"] = _bias(given["logit_bias"])
        if given.get("cfg_scale") == 1.0 or "negative_prompt" not in given:
            if given.pop("cfg_scale", 1.0) != 1.0:
                refuse(self.cfg_scale, "cfg_scale", "needs a negative_prompt")
            given.pop("negative_prompt", None)
        if (ngram := given.pop("speculative_ngram", None)) is not None:
            given.setdefault("speculation", "ngram" if ngram else "auto")
        for theirs, name in (
            ("json_schema", "schema"),
            ("regex_pattern", "regex"),
            ("grammar_string", "grammar"),
            ("ban_eos_token", "ignore_eos"),
        ):
            if theirs in given:
                given[name] = given.pop(theirs)
        return given


def with_valid_text(value: Any) -> Any:
    """Replace each lone surrogate in the strings of a JSON value by a question mark, as the tokenizer does.

    JSON can spell a lone surrogate, for example where a client has cut a text within an emoji. It has no UTF-8 form, and pydantic,
    the mask engine and the answer's own JSON would each refuse it with another message.
    """
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, list):
        return value if set(map(type, value)) <= {int, float} else [with_valid_text(one) for one in value]  # ids are many
    if isinstance(value, dict):
        return {with_valid_text(key): with_valid_text(one) for key, one in value.items()}
    return value


def allow_zero_top_p(options: dict[str, Any]) -> None:
    """Replace `top_p` 0, which OpenAI's API accepts, by its limit: only the most probable token is kept."""
    if options.get("top_p") == 0:
        del options["top_p"]
        options["top_k"] = 1


def refuse(value: Any, name: str, why: str) -> None:
    """Raise ApiError where a field was given."""
    if value is not None:
        raise ApiError(400, f"{name} {why}", param=name, code="unsupported_parameter")


def with_preset(given: Mapping[str, Any], preset: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a request, completed by a sampler preset: values, or objects with "override" and "force"."""
    merged = dict(given)
    for name, entry in preset.items():
        value, force = (entry.get("override"), entry.get("force", False)) if isinstance(entry, Mapping) else (entry, False)
        if force or merged.get(name) is None:
            merged[name] = value
    return merged


def check_preset(preset: Mapping[str, Any]) -> dict[str, Any]:
    """A sampler preset whose fields all exist; other names of a field become its own.

    Raises:
        ApiError: 400, names the field.
    """
    made: dict[str, Any] = {}
    for name, entry in preset.items():
        own = own_names(Sampling).get(name)
        if own is None:
            near = difflib.get_close_matches(name, own_names(Sampling), n=1)
            raise ApiError(400, f"preset: unknown field {name!r}{f'; did you mean {near[0]!r}?' if near else ''}", param=name)
        if isinstance(entry, Mapping) and (not set(entry) <= {"override", "force", "additive"} or entry.get("additive")):
            expected = "a value, or an object with 'override' and 'force'"
            raise ApiError(400, f"preset: {name} is {str(entry)[:80]}; expected {expected}", param=name)
        try:
            Sampling.model_validate({own: entry.get("override") if isinstance(entry, Mapping) else entry})
        except ValidationError as error:
            raise invalid_request(error.errors()) from None
        made[own] = entry
    return made


@cache
def own_names(body: type[BaseModel]) -> dict[str, str]:
    """All names of the fields of a body, with the fields' own."""
    names: dict[str, str] = {}
    for own, info in body.model_fields.items():
        names[own] = own
        for alias in info.validation_alias.choices if isinstance(info.validation_alias, AliasChoices) else ():
            names[str(alias)] = own
    return names


def _dynamic_temperature(given: dict[str, Any]) -> None:
    if spread := given.pop("dynatemp_range", 0.0):
        middle = given.pop("temperature", 1.0)
        given.update(min_temp=max(0.0, middle - spread), max_temp=middle + spread)
    if given.get("max_temp", 0.0) <= given.get("min_temp", 0.0):  # other servers' "off"
        for name in ("min_temp", "max_temp", "temp_exponent"):
            given.pop(name, None)
    else:
        given.pop("temperature", None)


def _ids(name: str, value: Any) -> list[int]:
    if not isinstance(value, str):
        return value
    try:
        return [int(part) for part in value.split(",") if part.strip()]
    except ValueError:
        raise ApiError(400, f"{name} is {value[:80]!r}; expected token ids", param=name, code="invalid_value") from None


def _breakers(value: Any) -> Any:
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        return json.loads(value)
    except ValueError:
        raise ApiError(
            400, f"dry_breakers is {value[:80]!r}; expected a list of texts", param="dry_breakers", code="invalid_value"
        ) from None


def _bias(value: Mapping[str, float]) -> dict[int, float]:
    try:
        return {int(token): bias for token, bias in value.items()}
    except ValueError:
        raise ApiError(400, "logit_bias: expected token ids as keys", param="logit_bias", code="invalid_value") from None
