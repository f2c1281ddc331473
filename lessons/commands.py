"""The command line of the lessons. `nanopd` loads this file at each start, so nothing heavy is imported up here."""

from typing import Annotated

import typer

from nanopd.cli import config_options
from nanopd.config import EngineConfig


def register(app: typer.Typer) -> None:
    """Adds `pd-demo` to the command line."""
    app.command("pd-demo")(run_pd_demo)


@config_options
def run_pd_demo(
    engine: EngineConfig,
    prompt_tokens: Annotated[int, typer.Option(help="Length of the longest prompt, about.", min=16)] = 1000,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate for each prompt.", min=2)] = 32,
    kv_push: Annotated[str, typer.Option(help="whole or per_chunk, see `nanopd serve`.")] = "whole",
    hosts: Annotated[
        str | None,
        typer.Option(metavar="P_URL,D_URL[,ROUTER_URL]", help="Use these nodes, and start a router at most."),
    ] = None,
    netns: Annotated[
        bool, typer.Option("--netns", help="Put P and D on two network namespaces (Linux, root).")
    ] = False,
    api_key: Annotated[str | None, typer.Option(help="The key that the nodes of --hosts ask for.")] = None,
    drill: Annotated[
        str | None, typer.Option(help="Break something on purpose: the name of a drill, all of them, or list.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a request, and a summary.")] = False,
) -> int:
    """Watch a prefill node (P), a decode node (D) and a router at work, and compare the answers with a single node.

    So that there is something to see, --dtype auto means float32 here (only then are the tokens sure to be equal),
    --num-blocks is small, and --long-prefill-token-threshold 0 means 256. With --hosts, all engine options but
    --block-size are those of the nodes, and the single node is D, asked without P.

    With --drill something fails while eight requests are in flight; without --model by a small random model. It prints one
    JSON object a drill with --json, and the exit code is 0 if every request got right tokens or a clear error in time, no
    block stayed held, and sixteen more were served rightly.
    """
    if drill is not None:
        from . import drills

        return drills.run(drill, engine, as_json)
    from . import pd_demo

    return pd_demo.run(pd_demo.Options(engine, prompt_tokens, max_tokens, kv_push, hosts, netns, api_key, as_json))
