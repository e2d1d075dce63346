"""POST /tokenize and POST /detokenize, in vLLM's shapes."""

from __future__ import annotations

from functools import partial
from typing import Any

from baton.errors import InvalidRequest, PromptTooLong, UnknownModel
from baton.models import ModelDir
from router.http.bodies import Bodies
from router.http.chat_requests import conversation
from router.http.exchange import Exchange
from router.http.requests import Asked
from router.http.schema_tokens import DetokenizeBody, TokenizeBody
from router.http.validation import read
from router.inference import Inference
from router.text import Text

_NAMES = {"chat": "messages", "template_arguments": "chat_template_kwargs"}


class Tokens:
    """The two endpoints."""

    def __init__(self, inference: Inference, model: ModelDir, text: Text, bodies: Bodies) -> None:
        self._inference = inference
        self._model = model
        self._text = text
        self._bodies = bodies

    async def tokenize(self, exchange: Exchange) -> None:
        """POST /tokenize: the ids that a completion, or a chat, would begin with."""
        self._inference.check_key(exchange.metadata)
        body = await self._bodies.read(await exchange.body(), partial(read, TokenizeBody))
        self._check_model(body.model)
        try:
            ids = await self._encode(body)
        except InvalidRequest as error:
            # A chat is too long by its messages.
            is_chat = isinstance(error, PromptTooLong) and body.messages is not None
            names = _NAMES | {"prompt": "messages"} if is_chat else _NAMES
            raise Asked(requests=[], names=names).renamed(error) from None
        reply: dict[str, Any] = {
            "count": len(ids),
            "max_model_len": self._model.max_model_len,
            "tokens": ids,
            "token_strs": None,
        }
        if body.return_token_strs:
            reply["token_strs"] = [self._text.texts.name_of(token_id) for token_id in ids]
        await exchange.reply(reply)

    async def detokenize(self, exchange: Exchange) -> None:
        """POST /detokenize: the text of these ids, with that of special tokens."""
        self._inference.check_key(exchange.metadata)
        body = await self._bodies.read(await exchange.body(), partial(read, DetokenizeBody))
        self._check_model(body.model)
        if body.tokens is None:
            raise InvalidRequest("tokens is missing", field="tokens")
        most = self._model.max_model_len
        if len(body.tokens) > most:
            raise InvalidRequest(f"tokens has {len(body.tokens)} ids; send at most {most}", field="tokens")
        unknown = next((i for i in body.tokens if i >= self._model.limits.vocab_size), None)
        if unknown is not None:
            raise InvalidRequest(
                f"tokens has the id {unknown}; ids are below {self._model.limits.vocab_size}", field="tokens"
            )
        text = self._text.tokenizer.decode(body.tokens, skip_special_tokens=False)
        await exchange.reply({"prompt": text})

    async def _encode(self, body: TokenizeBody) -> list[int]:
        if (body.prompt is None) is (body.messages is None):
            raise InvalidRequest("give one of prompt and messages", field="prompt")
        # Text gets the special tokens of the tokenizer, a chat those of its template.
        if body.add_special_tokens not in (None, body.prompt is not None):
            raise InvalidRequest(
                "add_special_tokens must be true for a prompt and false for messages, as in completions "
                "and chats",
                field="add_special_tokens",
            )
        if body.prompt is not None:
            return await self._text.encode(body.prompt, self._model.max_model_len)
        chat = conversation(body.messages, body.tools or (), body.chat_template_kwargs)
        return await self._text.encode_chat(chat, self._model.max_model_len)

    def _check_model(self, name: str | None) -> None:
        if name not in (None, "", self._model.name):
            raise UnknownModel(
                f"model {name[:64]!r} is not served here; this cluster serves {self._model.name!r}",
                field="model",
            )
