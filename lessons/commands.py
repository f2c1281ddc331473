"""The command line of the lessons. `nanopd` loads this file at each start, so nothing heavy is imported up here."""

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from nanopd.cli import config_options
from nanopd.config import EngineConfig, UserError


def register(app: typer.Typer) -> None:
    """Adds `pd-demo`, `lesson` and `grade` to the command line."""
    app.command("pd-demo")(run_pd_demo)
    app.command("lesson")(lesson)
    app.command("grade")(grade)


def lesson(
    what: Annotated[str, typer.Argument(help="list, or run.")],
    number: Annotated[str | None, typer.Argument(help="run: which lesson.", show_default=False)] = None,
    step: Annotated[bool, typer.Option("--step", help="run: wait before each piece of code.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="list: print one JSON object a lesson.")] = False,
) -> int:
    """List the lessons, or run the script of one: its claims are checked while it runs."""
    import json

    from . import course

    if what == "list" and number is None and not step:
        for one in course.lessons():
            facts = {"number": one.number, "title": one.title, "minutes": one.minutes, "path": str(one.path)}
            print(json.dumps(facts) if as_json else f"{one.number:02}  {one.minutes:3} min  {one.title}")
        return 0
    if what == "run" and number is not None and not as_json:
        return course.run(course.find(number), step)
    raise UserError("It is lesson list [--json] or lesson run NUMBER [--step].")


def grade(
    number: Annotated[str, typer.Argument(help="Which lesson.")],
    file: Annotated[Path, typer.Argument(help="The exercise, filled in.")],
    gradescope: Annotated[
        Path | None, typer.Option(help="Write results.json for Gradescope.", show_default=False)
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Of the cases' random numbers; without it drawn anew.", min=0)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a case, and a summary.")] = False,
) -> int:
    """Grade an exercise. Exit code 0: all points; 1: not all."""
    import json
    import time

    from . import course, grading, nodes
    from .show import console

    if gradescope and (gradescope.is_dir() or not gradescope.absolute().parent.is_dir()):
        raise UserError(f"--gradescope: {gradescope} cannot be written.")
    nodes.end_like_ctrl_c()
    start, one = time.monotonic(), course.find(number)
    with contextlib.nullcontext() if as_json else console.status("playing the cases …"):
        marks = grading.grade(one, file, seed)
    got, most = sum(mark.points for mark in marks), sum(mark.case.points for mark in marks)
    if gradescope:
        gradescope.write_text(grading.as_gradescope(marks, time.monotonic() - start))
    if as_json:
        for mark in marks:
            facts = {"case": mark.case.name, "title": mark.case.title, "points": mark.points, "of": mark.case.points}
            print(json.dumps(facts | {"problem": mark.problem, "hint": mark.case.hint if mark.problem else None}))
        print(json.dumps({"lesson": one.number, "points": got, "of": most}))
    else:
        grading.report(one, file, marks)
    return 0 if got == most else 1


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
        str | None,
        typer.Option(help="Break something on purpose: a drill, a point, all, or list; by default with a small model."),
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
