"""The application of the HTTP port: which path is whose."""

from __future__ import annotations

import random
from collections.abc import Callable

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from baton.models import ModelDir
from router.core import RouterCore
from router.http.bodies import Bodies
from router.http.doorman import Doorman
from router.http.errors import NOT_FOUND, WRONG_METHOD, HttpRefusal, body_of, headers_of
from router.http.exchange import to_json
from router.http.generating import Generating
from router.http.pages import Pages
from router.http.tokens import Tokens
from router.inference import Inference
from router.text import Offload, Text


def make_app(
    *,
    core: RouterCore,
    inference: Inference,
    model: ModelDir,
    text: Text,
    offload: Offload,
    registry: CollectorRegistry,
    rng: random.Random,
    wall: Callable[[], float],
) -> tuple[ASGIApp, Doorman]:
    """The application, and what ends it.

    offload: runs a function away from the event loop, on a bounded number of threads.
    registry: what /metrics shows.
    wall: seconds since 1970.
    """
    doorman = Doorman(core.config.max_requests, rng, wall)
    bodies = Bodies(offload)
    generating = Generating(inference, model, text, bodies, rng=rng, wall=wall)
    tokens = Tokens(inference, model, text, bodies)
    pages = Pages(
        inference,
        core.fleet,
        started_at=int(wall()),
        registry=registry,
        is_draining=lambda: doorman.is_draining,
    )
    serve = doorman.endpoint
    routes = [
        Route("/v1/completions", serve(generating.complete), methods=["POST"]),
        Route("/v1/chat/completions", serve(generating.chat), methods=["POST"]),
        Route("/tokenize", serve(tokens.tokenize), methods=["POST"]),
        Route("/detokenize", serve(tokens.detokenize), methods=["POST"]),
        Route("/v1/models", serve(pages.models), methods=["GET"]),
        Route("/v1/models/{name:path}", serve(pages.model), methods=["GET"]),
        Route("/health", serve(pages.health, drains=False), methods=["GET"]),
        Route("/ready", serve(pages.ready, drains=False), methods=["GET"]),
        Route("/version", serve(pages.version, drains=False), methods=["GET"]),
        Route("/metrics", serve(pages.metrics, drains=False), methods=["GET"]),
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _unrouted})
    app.router.redirect_slashes = False
    return doorman.around(app), doorman


def _unrouted(request: Request, error: Exception) -> Response:
    """Starlette's own refusals, in OpenAI's shape."""
    assert isinstance(error, HTTPException)
    form = WRONG_METHOD if error.status_code == WRONG_METHOD.status else NOT_FOUND
    what = f"{request.method} {request.url.path[:200]} is not served here"
    refusal = HttpRefusal(f"{what}; docs/http.md lists what is", form, error.headers)
    return Response(
        to_json(body_of(refusal), ensure_ascii=True),
        form.status,
        headers_of(refusal),
        media_type="application/json",
    )
