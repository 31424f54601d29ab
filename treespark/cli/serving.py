# SPDX-License-Identifier: Apache-2.0
"""The verb `serve`: an OpenAI server, with vLLM's flags where it has them."""

from pathlib import Path
from typing import Annotated, Any

import typer

from treespark.cli.app import app
from treespark.cli.flags import (
    Branching,
    Budget,
    Depth,
    Device,
    DrafterDir,
    Dtype,
    NoDrafter,
    Target,
    drafter_folder,
)
from treespark.errors import UsageError

Host = Annotated[str, typer.Option(help="Address to listen on; other machines need 0.0.0.0.")]
Port = Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")]


@app.command()
def serve(
    target: Target,
    drafter: DrafterDir = None,
    no_drafter: NoDrafter = False,
    depth: Depth = None,
    branching: Branching = None,
    budget: Budget = None,
    speculation: Annotated[
        str | None,
        typer.Option(
            help="auto: the budget that is fastest under the load, up to --budget; or off, chain, "
            "15, 32. Default: --budget if given, else auto."
        ),
    ] = None,
    speculative_config: Annotated[
        str | None,
        typer.Option(help='The drafter in JSON: {"model": DIR, "method": "treespark", ...}.'),
    ] = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    api_key: Annotated[
        list[str] | None, typer.Option(help="Key that clients must send; repeatable.")
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="File with one key a line; `ps` shows no key then.")
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(help="Name that clients use; repeatable. Default: the target folder's."),
    ] = None,
    dtype: Dtype = "auto",
    device: Device = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Most tokens of prompt plus answer. Default: the target's.")
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Requests decoded at a time.")] = 12,
    max_num_queued_reqs: Annotated[
        int, typer.Option(help="Requests that may wait; beyond them 503 with Retry-After.")
    ] = 128,
    enable_prefix_caching: Annotated[
        bool,
        typer.Option("--enable-prefix-caching", help="Do not read a cached beginning again."),
    ] = False,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Of sampled requests without one of their own.")
    ] = None,
    stream_interval: Annotated[
        int, typer.Option(help="Tokens per event of a stream; 1: as they come.")
    ] = 1,
    shutdown_timeout: Annotated[
        float, typer.Option(help="Seconds that running requests get after SIGTERM.")
    ] = 30.0,
    override_generation_config: Annotated[
        str | None,
        typer.Option(help='Sampling of requests that do not choose, as {"temperature": 1.0}.'),
    ] = None,
    per_request_spec_decode_metrics: Annotated[
        str, typer.Option(help="summary or none: `metrics` in every answer.")
    ] = "summary",
    metrics_compat: Annotated[
        str, typer.Option(help="vllm or none: vLLM's names in /metrics beside our own.")
    ] = "vllm",
    profile: Annotated[
        bool, typer.Option("--profile", help="Phases of a round in /metrics; costs a little speed.")
    ] = False,
) -> None:
    """Serve a target over the OpenAI API; the answers are the same with a drafter and without."""
    from treespark.serving.serve import (
        ServeOptions,
        read_keys,
        run_serve,
        sampling_defaults,
    )

    given = _speculation(speculative_config, drafter, no_drafter, depth, branching, budget)
    run_serve(
        ServeOptions(
            target=target,
            drafter=given.pop("drafter"),
            policy=given,
            host=host,
            port=port,
            api_keys=read_keys(api_key or [], api_key_file),
            served_model_name=tuple(served_model_name or ()),
            dtype=dtype,
            device=device,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_queued_reqs=max_num_queued_reqs,
            speculation=speculation,
            enable_prefix_caching=enable_prefix_caching,
            seed=seed,
            stream_interval=stream_interval,
            shutdown_timeout=shutdown_timeout,
            defaults=sampling_defaults(override_generation_config),
            request_metrics=_either(
                "--per-request-spec-decode-metrics", per_request_spec_decode_metrics, "summary"
            ),
            compatible=_either("--metrics-compat", metrics_compat, "vllm"),
            profile=profile,
        )
    )


def _either(option: str, value: str, chosen: str) -> bool:
    """Whether a choice between `chosen` and none is `chosen`."""
    if value not in (chosen, "none"):
        raise UsageError(f"{option} {value}: allowed: {chosen}, none")
    return value == chosen


def _speculation(
    text: str | None,
    drafter: Path | None,
    no_drafter: bool,
    depth: int | None,
    branching: int | None,
    budget: int | None,
) -> dict[str, Any]:
    """The drafter's folder (None without one) and the changes to its tree, by flags or JSON."""
    from treespark.serving.serve import speculative_config

    flags = {"drafter": drafter, "depth": depth, "branching": branching, "budget": budget}
    given: dict[str, Any] = {name: value for name, value in flags.items() if value is not None}
    config = speculative_config(text)
    twice = sorted(given.keys() & config.keys())
    if twice:
        raise UsageError(f"--speculative-config: contradicts --{twice[0]}; give one of the two")
    given |= config
    folder = drafter_folder(Path(given["drafter"]) if "drafter" in given else None, no_drafter)
    tree = {name: given.get(name) for name in ("depth", "branching", "budget")}
    changes = {name: value for name, value in tree.items() if value is not None}
    if changes:
        from treespark.bench.workload import check_policy_options

        check_policy_options(
            folder, depth=tree["depth"], branching=tree["branching"], budget=tree["budget"]
        )
    return {"drafter": folder} | changes
