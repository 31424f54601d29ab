# SPDX-License-Identifier: Apache-2.0
"""`treespark serve`: check the options, bind the port, load the models, serve until a signal."""

from __future__ import annotations

import dataclasses
import errno
import importlib.util
import ipaddress
import json
import logging
import math
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from treespark.errors import UsageError
from treespark.serving.limits import LENGTHS, NUMBERS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from treespark.serving.engine import Engine

logger = logging.getLogger(__name__)

_PACKAGES = ("fastapi", "uvicorn", "prometheus_client")
_DEFAULTS = ("temperature", "top_p", "top_k", "min_p")
# Ours -> vLLM's keys of --speculative-config.
_SPECULATIVE = {
    "drafter": "model",
    "depth": "num_speculative_tokens",
    "branching": "tree_top_k",
    "budget": "tree_budget",
}


@dataclass(frozen=True)
class ServeOptions:
    """Flags of `treespark serve` that are not the engine's; each flag has its field's name.

    policy: changes to the drafter's own tree.  speculation: see `Engine`; None is "auto" with a
    drafter whose budget the policy does not set.  seed: of sampled requests that bring none; None
    takes another one each time.  defaults: sampling fields for requests that leave them out.
    max_num_queued_reqs: requests that may wait beyond those that hold a slot.  shutdown_timeout:
    seconds that running requests get after SIGTERM.  profile: time the phases of each round.
    """

    target: Path
    drafter: Path | None = None
    policy: dict[str, int] = field(default_factory=dict)
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    served_model_name: tuple[str, ...] = ()
    dtype: str = "auto"
    device: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 12
    max_num_queued_reqs: int = 128
    speculation: str | None = None
    seed: int | None = None
    stream_interval: int = 1
    shutdown_timeout: float = 30.0
    defaults: dict[str, float] = field(default_factory=dict)
    request_metrics: bool = True
    compatible: bool = True
    enable_prefix_caching: bool = False
    profile: bool = False


def run_serve(options: ServeOptions) -> None:
    """Serve until SIGTERM or SIGINT and return once the requests have ended.

    Raises UsageError for a wrong option, a missing package, a port in use and models that do not
    fit; nothing has been loaded before the port is bound.
    """
    check_packages()
    _check(options)
    with bound_socket(options.host, options.port) as sock:
        _serve(options, sock)


def check_packages() -> None:
    """Raise UsageError without the web packages."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"treespark serve needs {', '.join(missing)}: pip install 'treespark[serve]'"
        )


def _check(options: ServeOptions) -> None:
    lowest = {"port": 0, "max_num_seqs": 1, "max_num_queued_reqs": 0, "stream_interval": 1}
    for name, low in (*lowest.items(), ("shutdown_timeout", 0)):
        value = getattr(options, name)
        if not (value >= low and math.isfinite(value)):
            raise UsageError(f"--{name.replace('_', '-')} {value}: need at least {low}")
    if options.port > 65535:
        raise UsageError(f"--port {options.port}: allowed: 0..65535")
    for key in options.api_keys:
        if not key or not all("!" <= c <= "~" for c in key):
            raise UsageError("--api-key: need printable ASCII characters without spaces")
    for name in options.served_model_name:
        if not 0 < len(name) <= LENGTHS["model"] or not name.isprintable():
            raise UsageError(f"--served-model-name {name!r}: need 1..{LENGTHS['model']} characters")
    fixed = options.speculation not in (None, "auto")
    if fixed and "budget" in options.policy:
        raise UsageError(
            f"--speculation {options.speculation}: contradicts --budget "
            f"{options.policy['budget']}; give one of the two"
        )
    # The rest of the folder is checked when it is read; this needs no torch.
    if not (options.target / "config.json").is_file():
        raise UsageError(f"target {options.target}: no config.json (a model folder is expected)")


def bound_socket(host: str, port: int) -> socket.socket:
    """Return a socket bound to the address, not yet listening. Raises UsageError naming it."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise UsageError(f"--host {host}: {error.strerror}") from None
    sock = socket.socket(family, socket.SOCK_STREAM)
    # A port whose last connections linger can be bound; one that is listened on cannot.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise UsageError(f"--port {port}: already in use on {host}") from None
        raise UsageError(f"--host {host} --port {port}: {error.strerror}") from None
    return sock


def _serve(options: ServeOptions, sock: socket.socket) -> None:
    logger.info("loading %s", options.target)
    # Beside the event loop's packages this loads torch.
    from treespark.serving.async_engine import AsyncEngine
    from treespark.serving.server import run_server

    engine = AsyncEngine(lambda: _build(options), options.max_num_queued_reqs)
    engine.load()
    try:
        service = make_service(engine, options)
        host, port = sock.getsockname()[:2]
        if not options.api_keys and not _is_loopback(host):
            logger.warning("%s can be reached from other machines and there is no --api-key", host)
        logger.info("serving %s on http://%s:%d", service.options.model_names[0], host, port)
        run_server(service, sock, options.api_keys, options.shutdown_timeout)
    finally:
        engine.stop()
    if engine.failure is not None:
        raise RuntimeError("the engine stopped after an error") from engine.failure


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback


def _build(options: ServeOptions) -> Engine:
    """Load the models and make the engine; runs in the engine's own thread."""
    from treespark.device import seed_everything
    from treespark.serving.checks import default_policy
    from treespark.serving.engine import Engine
    from treespark.serving.llm import load_pair

    if options.seed is not None:
        seed_everything(options.seed)

    target, drafter = load_pair(
        options.target, options.drafter, dtype=options.dtype, device=options.device
    )
    return Engine(
        target,
        drafter,
        dataclasses.replace(default_policy(drafter), **options.policy),
        max_num_seqs=options.max_num_seqs,
        max_model_len=options.max_model_len,
        speculation=speculation_mode(options),
        reuse_prefixes=options.enable_prefix_caching,
        profile=options.profile,
    )


def speculation_mode(options: ServeOptions) -> str | None:
    """Return how much the engine drafts: a server has loads that a fixed tree is wrong for."""
    if options.speculation is None and options.drafter and "budget" not in options.policy:
        return "auto"
    return options.speculation


def make_service(engine: Any, options: ServeOptions) -> Any:
    """Return the service of a loaded `AsyncEngine`, with a tokenizer of its own."""
    from treespark.serving.checks import TOKENIZER_FILES
    from treespark.serving.codec import Codec
    from treespark.serving.service import Service, ServiceOptions
    from treespark.target.template import open_tokenizer

    inner = engine.engine
    target, policy = inner.target, inner.policy
    has_text = any((target.path / name).is_file() for name in TOKENIZER_FILES)
    tokenizer = open_tokenizer(target.path, "target") if has_text else None
    tree = None
    if inner.drafter is not None:
        tree = {name: getattr(policy, name) for name in ("depth", "branching", "budget")}
    described = {
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": str(target.device),
        "speculation": inner.control.mode,
        "max_num_seqs": options.max_num_seqs,
        "max_num_queued_reqs": options.max_num_queued_reqs,
        "stream_interval": options.stream_interval,
    }
    return Service(
        engine,
        Codec(tokenizer, target.vocab_size, inner.max_model_len),
        None if tokenizer is None else tokenizer.backend_tokenizer,
        ServiceOptions(
            options.served_model_name or (options.target.resolve().name,),
            options.defaults,
            options.stream_interval,
            tree,
            options.request_metrics,
            options.compatible,
            described,
        ),
    )


# ------------------------------------------------------------------ flags that hold JSON


def sampling_defaults(text: str | None) -> dict[str, float]:
    """Return --override-generation-config, as in vLLM. Raises UsageError.

    What is not given stays greedy: temperature 0.
    """
    option = "--override-generation-config"
    given = _json_object(option, text, _DEFAULTS)
    for name, value in given.items():
        bounds = NUMBERS[name]
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not bounds.low <= value <= bounds.high:
            allowed = f"allowed: numbers in {bounds.low:g}..{bounds.high:g}"
            raise UsageError(f"{option}: {name} {value!r}: {allowed}")
        if name == "top_k" and not isinstance(value, int):
            raise UsageError(f"{option}: {name} {value!r}: need a whole number")
    return given


def speculative_config(text: str | None) -> dict[str, Any]:
    """Return drafter, depth, branching and budget of --speculative-config. Raises UsageError."""
    option = "--speculative-config"
    given = _json_object(option, text, ("method", *_SPECULATIVE.values()))
    if given.pop("method", "treespark") != "treespark":
        raise UsageError(f"{option}: method: allowed: treespark")
    found = {ours: given[theirs] for ours, theirs in _SPECULATIVE.items() if theirs in given}
    for ours, value in found.items():
        is_right = isinstance(value, str if ours == "drafter" else int)
        if not is_right or isinstance(value, bool):
            need = "a folder" if ours == "drafter" else "a whole number"
            raise UsageError(f"{option}: {_SPECULATIVE[ours]} {value!r}: need {need}")
    return found


def _json_object(option: str, text: str | None, allowed: Sequence[str]) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise UsageError(f"{option} {text[:200]}: need a JSON object")
    unknown = [key for key in value if key not in allowed]
    if unknown:
        raise UsageError(f"{option}: {unknown[0][:100]}: allowed: {', '.join(allowed)}")
    return value


def read_keys(given: Sequence[str], file: Path | None) -> tuple[str, ...]:
    """Return the keys of --api-key and of --api-key-file, one a line. Raises UsageError."""
    if file is None:
        return tuple(given)
    try:
        lines = file.read_text("utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        raise UsageError(f"--api-key-file {file}: {reason}") from None
    if not lines:
        raise UsageError(f"--api-key-file {file}: has no key")
    return (*given, *lines)
