"""`gpuledger autoscale`: checks manifests of autoscalers for known mistakes."""

import json
import sys
from collections.abc import Iterator, Sequence
from typing import Annotated, Final, Literal

from cyclopts import App, Parameter

from gpuledger.errors import UserError
from gpuledger.texts import counted
from gpuledger_cli.autoscale.autoscalers import STANDARD_INPUT, Autoscaler, read_autoscalers
from gpuledger_cli.autoscale.mistakes import Finding, find_mistakes
from gpuledger_cli.option_help import epilogue

WRONG: Final = 1
_SEE_HELP: Final = "see `gpuledger autoscale check --help`"
app = App(name="autoscale", help_format="plaintext")


@app.command(
    usage="gpuledger autoscale check [OPTIONS] FILE...",
    help_epilogue=epilogue(
        "The command does not query the cluster or Prometheus. It reports only mistakes that the"
        " manifests show, in signals of GPU use.",
        examples={
            "Before you apply a manifest": "gpuledger autoscale check chat.yaml",
            "With its Deployment, which shows whether the GPUs are shared": (
                "gpuledger autoscale check chat.yaml deployment.yaml"
            ),
            "All autoscalers of a cluster with KEDA": (
                "kubectl get scaledobjects,scaledjobs,hpa -A -o yaml \\\n"
                "    | gpuledger autoscale check -"
            ),
            "All autoscalers of a cluster without KEDA": (
                "kubectl get hpa -A -o yaml | gpuledger autoscale check -"
            ),
        },
        codes={0: "no mistake was found", 1: "at least one mistake; each is printed with its line"},
    ),
)
def check(
    *files: Annotated[
        str,
        Parameter(
            name="FILE",
            help="Manifests (YAML, any number of documents), or - for standard input. Objects"
            " other than autoscalers and their workloads are ignored.",
            allow_leading_hyphen=True,
        ),
    ],
    shared_gpus: Annotated[
        bool,
        Parameter(
            negative=(),
            help="State that the pods share GPUs, for example by time-slicing. By default, this"
            " applies only to pods that request a MIG instance or a share.",
        ),
    ] = False,
    format: Annotated[  # noqa: A002  # the option's name
        Literal["table", "json"],
        Parameter(help="table: a paragraph per mistake; json: one object."),
    ] = "table",
) -> int:
    """Find known mistakes in ScaledObjects, ScaledJobs and HorizontalPodAutoscalers."""
    if not files:
        raise UserError(f"FILE: missing; {_SEE_HELP}")
    # Because `-` is allowed, cyclopts passes unknown options as well.
    if unknown := [name for name in files if name.startswith("-") and name != STANDARD_INPUT]:
        raise UserError(f"unknown option: {unknown[0]}; {_SEE_HELP}")
    if sys.stdin.isatty() and STANDARD_INPUT in files:
        sys.stderr.write("gpuledger: reading manifests from the terminal; Ctrl-D ends\n")
    autoscalers = read_autoscalers(files)
    if not autoscalers:
        raise UserError(
            f"{', '.join(files)}: no ScaledObject, ScaledJob or HorizontalPodAutoscaler;"
            " give the manifest of an autoscaler"
        )
    found = [
        finding
        for autoscaler in autoscalers
        for finding in find_mistakes(autoscaler, gpus_are_shared=shared_gpus)
    ]
    lines = as_json(autoscalers, found) if format == "json" else as_text(autoscalers, found)
    for line in lines:
        sys.stdout.write(f"{line}\n")
    return WRONG if found else 0


def as_text(autoscalers: Sequence[Autoscaler], found: Sequence[Finding]) -> Iterator[str]:
    """Yield a paragraph for each mistake, and a summary."""
    for autoscaler, line, mistake in found:
        name = f"{autoscaler.namespace}/{autoscaler.name}"
        yield f"{autoscaler.file}:{line}: {autoscaler.kind} {name}: {mistake.name}"
        yield f"  {mistake.problem}"
        yield f"  Fix: {mistake.fix}"
    mistakes = counted(len(found), "mistake") if found else "no mistakes"
    yield f"{counted(len(autoscalers), 'autoscaler')}: {mistakes} found"


def as_json(autoscalers: Sequence[Autoscaler], found: Sequence[Finding]) -> Iterator[str]:
    """Yield one object with all mistakes."""
    yield json.dumps(
        {
            "autoscalers": len(autoscalers),
            "mistakes": [
                {
                    "file": autoscaler.file,
                    "line": line,
                    "kind": autoscaler.kind,
                    "namespace": autoscaler.namespace,
                    "name": autoscaler.name,
                    "mistake": mistake.name,
                    "problem": mistake.problem,
                    "fix": mistake.fix,
                }
                for autoscaler, line, mistake in found
            ],
        }
    )
