"""Deeds that the owner of the machine does from the page or by a script: POST /control/WORD."""

from __future__ import annotations

import logging
from urllib.parse import parse_qsl

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response

from p2pdiloco.daemon.owner.control import OwnerControls
from p2pdiloco.errors import UserError, clean
from p2pdiloco.web.words import Control

logger = logging.getLogger(__name__)
MAX_BODY = 4096
MAX_CHANGES = 32
_limits = msgspec.json.Decoder(dict[str, str])


async def do(controls: OwnerControls, request: Request) -> Response:
    """Do what is asked. The answer is JSON for who wants that, else the way back to the page."""
    try:
        word = Control(request.path_params["word"])
    except ValueError:
        raise HTTPException(404) from None
    body = await _body(request)
    try:
        words, hint, is_done = await _do(controls, word, body), "", True
    except UserError as error:
        words, hint, is_done = str(error), error.hint, False
    logger.info("asked for %s on the web page: %s", word.value, clean(words))
    if "application/json" in request.headers.get("accept", ""):
        return JSONResponse({"ok": is_done, "words": words, "hint": hint}, 200 if is_done else 400)
    return RedirectResponse("../", 303)


async def _do(controls: OwnerControls, word: Control, body: bytes) -> str:
    match word:
        case Control.PAUSE:
            return await controls.pause()
        case Control.RESUME:
            return await controls.resume()
        case Control.FINISH:
            return controls.finish()
        case Control.LIMITS:
            return await controls.limits(_changes(body))


def _changes(body: bytes) -> dict[str, str]:
    """Read changes of limits: a form of the page, or a JSON object of texts. Raises: UserError."""
    try:
        if body.lstrip().startswith(b"{"):
            found = _limits.decode(body)
        else:
            found = dict(parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=MAX_CHANGES))
    except (msgspec.DecodeError, ValueError) as error:
        raise UserError(f"the limits cannot be read: {str(error)[:120]}") from None
    if not found or len(found) > MAX_CHANGES:
        raise UserError("there is no limit to change", "for example max-upload=20Mbit")
    return {name: value.strip() for name, value in found.items()}


async def _body(request: Request) -> bytes:
    parts = bytearray()
    async for part in request.stream():
        parts += part
        if len(parts) > MAX_BODY:
            raise HTTPException(413)
    return bytes(parts)
