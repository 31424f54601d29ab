# SPDX-License-Identifier: Apache-2.0
"""Judges that others wrote, against a running server: schemathesis, lm-eval, wrk.

Each is skipped where it is not on the PATH; best in an environment of its own, without torch:

    python -m venv judges && judges/bin/pip install schemathesis "lm-eval[api]==0.4.13" transformers
    apt-get install -y wrk
    PATH=$PATH:$PWD/judges/bin bash tools/test.sh tests/serving/test_judges.py -m slow
"""

import json
import os
import re
import shutil
import subprocess

import httpx
import pytest

from tests.http_world import ServerProcess, tiny

pytestmark = pytest.mark.slow

CHECKS = ("not_a_server_error", "status_code_conformance", "content_type_conformance",
          "response_schema_conformance")  # fmt: skip
QUESTIONS = ("how are you", "one two three", "abc", "what is 1 + 1")
TASKS = {
    "ts_generate": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 24, do_sample: false}
metric_list: [{metric: exact_match}]
""",
    "ts_choose": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: ["yes", "no", "maybe"]
doc_to_target: 0
metric_list: [{metric: acc}]
""",
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("judges")


@pytest.fixture(scope="module")
def server(root):
    made = ServerProcess(root, name="trees")
    try:
        yield made
    finally:
        made.kill()


def tool(name):
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


def run(command, folder, **environment):
    done = subprocess.run(
        list(map(str, command)), cwd=folder, capture_output=True, text=True, timeout=560,
        env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


def test_schemathesis_finds_no_server_error(root):
    tool("schemathesis")
    # A short context: a chat without a limit fills it, and hundreds of them are sent.
    server = ServerProcess(root, "--max-model-len", "64", name="short")
    try:
        judge_schema(server, root)
    finally:
        server.kill()


def judge_schema(server, root):
    command = [tool("schemathesis"), "run", f"{server.url}/openapi.json", "--max-examples", "40"]
    out = run([*command, "--checks", ",".join(CHECKS), "--workers", "2"], root)
    # The exit code tells of failures; this tells that all operations were really asked.
    paths = httpx.get(f"{server.url}/openapi.json").json()["paths"]
    tested = int(re.search(r"Tested: (\d+)", out)[1])
    assert tested == sum(len(operations) for operations in paths.values())
    assert int(re.search(r"(\d+) generated", out)[1]) > 20 * tested


def test_wrk_reads_the_health_check_without_an_error(server, root):
    out = run([tool("wrk"), "-t2", "-c200", "-d3s", f"{server.url}/health"], root)
    assert "Non-2xx" not in out
    assert "Socket errors" not in out or re.search(r"connect 0, read 0, write 0", out)


def evaluate(server, folder, model, endpoint, tasks, *options):
    """Run lm-eval; returns the answers by task and document."""
    settings = f"model=tiny,base_url={server.url}/v1/{endpoint},num_concurrent=4,max_retries=1"
    settings += f",max_length=250,tokenizer_backend=huggingface,tokenizer={tiny().target.path}"
    out = folder / f"{server.log.stem}-{model}"
    run(
        [tool("lm_eval"), "--model", model, "--model_args", settings, "--include_path", folder,
         "--tasks", ",".join(tasks), "--log_samples", "--output_path", out, *options],
        folder, HF_HUB_OFFLINE="1", OPENAI_API_KEY="none",
    )  # fmt: skip
    answers = {}
    for path in sorted(out.rglob("samples_*.jsonl")):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            answers[path.stem.rpartition("_2")[0], row["doc_id"]] = row["resps"]
    assert len(answers) == len(tasks) * len(QUESTIONS)
    return answers


def test_lm_eval_gets_identical_samples_with_trees_and_without(server, root):
    tool("lm_eval")
    rows = [{"question": text, "answer": "x"} for text in QUESTIONS]
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {root}/rows.jsonl}}}}\n"
    for name, text in TASKS.items():
        (root / f"{name}.yaml").write_text(f"task: {name}\ntest_split: test\n{data}{text}")
    plain = ServerProcess(root, "--speculation", "off", name="plain")
    try:
        for model, endpoint, tasks, options in (
            ("local-completions", "completions", list(TASKS), ()),
            ("local-chat-completions", "chat/completions", ["ts_generate"],
             ("--apply_chat_template",)),
        ):  # fmt: skip
            with_trees = evaluate(server, root, model, endpoint, tasks, *options)
            without = evaluate(plain, root, model, endpoint, tasks, *options)
            assert with_trees == without
    finally:
        plain.kill()
