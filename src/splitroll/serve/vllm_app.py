"""vLLM's own HTTP application, to be attached to a front end of ours."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from fastapi import FastAPI
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser

_TASKS = ("generate",)


@dataclass(frozen=True, slots=True)
class VllmApp:
    """The application, which answers nothing before a client is attached."""

    app: FastAPI
    args: Namespace

    async def attach(self, client: Any) -> None:
        await init_app_state(client, self.app.state, self.args, _TASKS)
        # What vLLM would end when its engine dies; a fleet brings its engines back.
        self.app.state.server = SimpleNamespace(should_exit=False)


def vllm_app(arguments: Mapping[str, Any], model_name: str) -> tuple[VllmConfig, VllmApp]:
    """Return vLLM's configuration and application for engine arguments."""
    config = AsyncEngineArgs(**arguments).create_engine_config(UsageContext.OPENAI_API_SERVER)
    args = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    args.model = arguments["model"]
    args.served_model_name = [model_name]
    args.enable_scale_out = True  # /inference/v1/generate
    args.disable_fastapi_docs = False
    return config, VllmApp(build_app(args, _TASKS, config.model_config), args)
