# SPDX-License-Identifier: Apache-2.0
"""The verbs `bench serve`, load on a server with vLLM's flags, `bench acceptance`, `calibrate`."""

from pathlib import Path
from typing import Annotated

import typer

from treespark.cli.app import app
from treespark.cli.flags import AsJson, Device, Dtype, MaxTokens, Seed, Target

bench = typer.Typer(help="Measure a server, drafters, or decoding methods.", rich_markup_mode=None)
app.add_typer(bench, name="bench")


@bench.command("serve")
def bench_serve(
    base_url: Annotated[str, typer.Option(help="Server, as http://host:8000.")],
    dataset_path: Annotated[
        Path | None, typer.Option(help="JSONL file of prompts, for --dataset-name custom.")
    ] = None,
    dataset_name: Annotated[str, typer.Option(help="custom or random.")] = "custom",
    backend: Annotated[
        str, typer.Option(help="openai (completions) or openai-chat.")
    ] = "openai-chat",
    endpoint: Annotated[
        str | None, typer.Option(help="Path. Default: the backend's under /v1.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Default: the only one served.")] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests; prompts repeat.")] = 100,
    max_concurrency: Annotated[
        int | None, typer.Option(min=1, help="Requests at a time: a closed loop.")
    ] = None,
    request_rate: Annotated[
        float, typer.Option(help="Requests a second, arriving at random; inf: at once.")
    ] = float("inf"),
    burstiness: Annotated[
        float, typer.Option(help="Shape of the arrival gaps: 1 is Poisson, below it in bursts.")
    ] = 1.0,
    output_len: Annotated[
        int, typer.Option("--output-len", "--custom-output-len", min=1, help="Most tokens.")
    ] = 128,
    random_input_len: Annotated[
        int, typer.Option(min=1, help="Prompt tokens of --dataset-name random.")
    ] = 128,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Answers of full length.")
    ] = False,
    temperature: Annotated[float, typer.Option(help="Sent with every request.")] = 0.0,
    seed: Seed = 0,
    num_warmups: Annotated[int, typer.Option(min=0, help="Requests before it counts.")] = 0,
    percentile_metrics: Annotated[
        str, typer.Option(help="Of ttft, tpot, itl, e2el.")
    ] = "ttft,tpot,itl,e2el",
    metric_percentiles: Annotated[str, typer.Option(help="Percentiles, comma-separated.")] = "99",
    api_key_env: Annotated[
        str, typer.Option(help="Variable with the server's key.")
    ] = "OPENAI_API_KEY",
    save_result: Annotated[bool, typer.Option("--save-result", help="Write a JSON file.")] = False,
    result_dir: Annotated[Path, typer.Option(help="Its folder.")] = Path("."),
    result_filename: Annotated[
        str | None, typer.Option(help="Its name. Default: of time and load.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Send prompts to any OpenAI server; throughput, time to first and per token, acceptance."""
    from treespark.bench.load import LoadOptions, run_load

    run_load(
        LoadOptions(
            base_url=base_url,
            dataset_path=dataset_path,
            dataset_name=dataset_name,
            backend=backend,
            endpoint=endpoint,
            model=model,
            num_prompts=num_prompts,
            max_concurrency=max_concurrency,
            request_rate=request_rate,
            burstiness=burstiness,
            output_len=output_len,
            random_input_len=random_input_len,
            ignore_eos=ignore_eos,
            temperature=temperature,
            seed=seed,
            num_warmups=num_warmups,
            percentile_metrics=percentile_metrics,
            metric_percentiles=metric_percentiles,
            api_key_env=api_key_env,
            save_result=save_result,
            result_dir=result_dir,
            result_filename=result_filename,
        ),
        as_json,
    )


@bench.command("acceptance")
def bench_acceptance(
    target: Target,
    drafters: Annotated[
        list[Path], typer.Option("--drafter", help="Folder of a drafter; repeatable.")
    ],
    prompts: Annotated[
        list[Path], typer.Option("--prompts", help="JSONL file of prompts; repeatable.")
    ],
    num_prompts: Annotated[
        int | None, typer.Option(min=1, help="Prompts of each file. Default: all.")
    ] = None,
    budget: Annotated[
        int | None, typer.Option(help="Nodes of the trees. Default: each drafter's config.")
    ] = None,
    max_tokens: MaxTokens = 128,
    batch_size: Annotated[int, typer.Option(min=1, help="Requests decoded at a time.")] = 8,
    replay: Annotated[
        bool,
        typer.Option(
            "--replay", help="Let the target answer once and replay all drafters along its answers."
        ),
    ] = False,
    dtype: Dtype = "auto",
    device: Device = None,
    out: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
    as_json: AsJson = False,
) -> None:
    """Decode the same prompts with several drafters; acceptance by domain, as chain and tree."""
    from treespark.bench.acceptance import run_acceptance

    run_acceptance(
        target,
        drafters,
        prompts,
        num_prompts=num_prompts,
        budget=budget,
        batch_size=batch_size,
        max_tokens=max_tokens,
        replay=replay,
        dtype=dtype,
        device=device,
        out=out,
        as_json=as_json,
    )


@bench.command("calibrate")
def bench_calibrate(
    target: Target,
    drafter: Annotated[Path, typer.Option("--drafter", help="Folder of the drafter.")],
    prompts: Annotated[
        list[Path], typer.Option("--prompts", help="JSONL file of prompts; repeatable.")
    ],
    num_prompts: Annotated[
        int | None, typer.Option(min=1, help="Prompts of each file. Default: all.")
    ] = None,
    budget: Annotated[int, typer.Option(min=1, help="Nodes of the trees.")] = 64,
    branching: Annotated[int, typer.Option(help="Children per parent.")] = 8,
    max_tokens: MaxTokens = 128,
    batch_size: Annotated[int, typer.Option(min=1, help="Requests decoded at a time.")] = 8,
    dtype: Dtype = "auto",
    device: Device = None,
    out: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
    as_json: AsJson = False,
) -> None:
    """Fit a drafter's chances to what is accepted: alpha and beta of the calibrated method."""
    from treespark.bench.calibration import run_calibration

    run_calibration(
        target,
        drafter,
        prompts,
        num_prompts=num_prompts,
        budget=budget,
        branching=branching,
        batch_size=batch_size,
        max_tokens=max_tokens,
        dtype=dtype,
        device=device,
        out=out,
        as_json=as_json,
    )
