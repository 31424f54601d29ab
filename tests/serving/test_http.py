# SPDX-License-Identifier: Apache-2.0
"""The OpenAI endpoints over a tiny engine with trees: the target's own tokens in vLLM's shapes."""

import asyncio
import math
import re
import time

import pytest

from tests.http_world import CONTEXT, EOS, events_of, serving, tiny, tiny_engine
from tests.serving_world import byte_tokenizer
from treespark.serving.api_error import ERROR_TYPES

PROMPT = "one two three"
IDS = list(PROMPT.encode())
CHAT_IDS = list(f"[user]{PROMPT}[assistant]".encode())


@pytest.fixture(scope="module")
def server():
    with serving() as made:
        yield made


def reference(ids, max_tokens):
    return tiny().reference(ids, max_tokens, (EOS,))


def text_of(ids):
    return byte_tokenizer().decode(ids, skip_special_tokens=True).rstrip("\ufffd")


def test_completion_has_the_targets_own_tokens_and_vllms_fields(server):
    body = server.complete(PROMPT, max_tokens=24, return_token_ids=True)
    (choice,) = body["choices"]
    expected = reference(IDS, 24)
    assert choice["token_ids"] == expected
    assert choice["text"] == text_of(expected)
    assert choice["prompt_token_ids"] == IDS
    assert choice["finish_reason"] == ("stop" if expected[-1] == EOS else "length")
    assert choice["index"] == 0
    assert choice["logprobs"] is None
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["model"] == "tiny"
    num_prompt, num_output = len(IDS), len(expected)
    assert body["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
    }


def test_token_ids_as_a_prompt_give_the_same(server):
    assert (
        server.complete(IDS, max_tokens=9)["choices"]
        == server.complete(PROMPT, max_tokens=9)["choices"]
    )


def test_chat_completion_renders_the_template(server):
    body = server.chat(PROMPT, max_tokens=16, return_token_ids=True, ignore_eos=True)
    (choice,) = body["choices"]
    assert body["object"] == "chat.completion"
    assert body["prompt_token_ids"] == CHAT_IDS
    assert choice["token_ids"] == tiny().reference(CHAT_IDS, 16)
    assert choice["message"] == {"role": "assistant", "content": text_of(choice["token_ids"])}
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)


def test_a_chat_answer_may_fill_the_context_and_a_completion_has_sixteen_tokens(server):
    assert server.chat("a", ignore_eos=True)["usage"]["total_tokens"] == CONTEXT
    assert server.complete("a", ignore_eos=True)["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_adds_up_to_the_plain_answer(server, path):
    fields = {"max_tokens": 30, "return_token_ids": True, "ignore_eos": True}
    is_chat = "chat" in path
    fields |= {"messages": [{"role": "user", "content": PROMPT}]} if is_chat else {"prompt": PROMPT}
    plain = server.post(path, fields).json()
    *events, last = server.stream(path, stream_options={"include_usage": True}, **fields)
    assert last["choices"] == []
    assert last["usage"] == plain["usage"]
    assert {event["id"] for event in events} == {events[0]["id"]}
    choices = [event["choices"][0] for event in events]
    if is_chat:
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        text = "".join(choice["delta"].get("content", "") for choice in choices)
        assert text == plain["choices"][0]["message"]["content"]
        assert {event["object"] for event in events} == {"chat.completion.chunk"}
    else:
        assert "".join(c["text"] for c in choices) == plain["choices"][0]["text"]
        assert choices[0]["prompt_token_ids"] == IDS
    ids = [token for choice in choices for token in choice.get("token_ids", [])]
    assert ids == plain["choices"][0]["token_ids"]
    reasons = [choice["finish_reason"] for choice in choices]
    assert reasons == [None] * (len(choices) - 1) + ["length"]


def test_usage_can_come_with_every_event(server):
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = server.stream(
        "/v1/completions", prompt=PROMPT, max_tokens=12, ignore_eos=True, stream_options=options
    )
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 12


def test_without_stream_options_no_event_has_usage(server):
    events = server.stream("/v1/completions", prompt=PROMPT, max_tokens=4)
    assert not any("usage" in event for event in events)


def test_choices_of_several_prompts_come_in_order(server):
    body = server.complete(["ab", "xyz"], n=2, max_tokens=8, return_token_ids=True)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    for choice in body["choices"]:
        prompt = list([b"ab", b"xyz"][choice["index"] // 2])
        assert choice["prompt_token_ids"] == prompt
        assert choice["token_ids"] == reference(prompt, 8)
    assert body["usage"]["prompt_tokens"] == 5
    assert body["metrics"] is None


def test_a_stream_of_two_choices_keeps_them_apart(server):
    events = server.stream("/v1/completions", prompt=["ab", "xyz"], max_tokens=8, ignore_eos=True)
    for index, prompt in enumerate((b"ab", b"xyz")):
        own = [e["choices"][0] for e in events if e["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in own) == text_of(
            tiny().reference(list(prompt), 8)
        )
        assert own[-1]["finish_reason"] == "length"


def test_a_stop_string_cuts_text_ids_and_usage_together(server):
    whole = server.complete(PROMPT, max_tokens=30, ignore_eos=True)["choices"][0]["text"]
    stop = whole[4:6]
    body = server.complete(
        PROMPT, max_tokens=30, ignore_eos=True, stop=[stop], return_token_ids=True, logprobs=0
    )
    (choice,) = body["choices"]
    assert choice["text"] == whole[: whole.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert len(choice["token_ids"]) == body["usage"]["completion_tokens"]
    assert len(choice["logprobs"]["tokens"]) == len(choice["token_ids"])
    events = server.stream(
        "/v1/completions", prompt=PROMPT, max_tokens=30, ignore_eos=True, stop=stop
    )
    assert "".join(event["choices"][0]["text"] for event in events) == choice["text"]


def test_completion_logprobs_are_the_targets_and_lie_on_the_text(server):
    fields = {"max_tokens": 10, "ignore_eos": True, "logprobs": 2}
    (choice,) = server.complete(PROMPT, **fields)["choices"]
    logprobs = choice["logprobs"]
    assert {len(part) for part in logprobs.values()} == {10}
    for token, logprob, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert logprob == pytest.approx(max(top.values()))
        assert token in top
        assert sum(map(math.exp, top.values())) <= 1.0001
    offsets = logprobs["text_offset"]
    assert offsets[0] == 0
    assert offsets == sorted(offsets)


def test_chat_logprobs_have_bytes_and_alternatives(server):
    (choice,) = server.chat(PROMPT, max_tokens=6, logprobs=True, top_logprobs=3)["choices"]
    for entry in choice["logprobs"]["content"]:
        assert entry["bytes"] == list(entry["token"].encode())
        assert len(entry["top_logprobs"]) == 3
        assert entry["top_logprobs"][0]["logprob"] == entry["logprob"]


def test_streamed_logprobs_are_the_plain_ones(server):
    fields = {"prompt": PROMPT, "max_tokens": 12, "ignore_eos": True, "logprobs": 1, "echo": True}
    plain = server.post("/v1/completions", fields).json()["choices"][0]["logprobs"]
    events = server.stream("/v1/completions", **fields)
    for name, values in plain.items():
        streamed = [value for e in events for value in e["choices"][0]["logprobs"][name]]
        assert streamed == values, name


def test_echo_gives_the_prompts_own_logprobs_for_an_evaluation(server):
    fields = {"echo": True, "logprobs": 1, "temperature": 0}
    nothing = server.complete(PROMPT, max_tokens=0, **fields)
    (choice,) = nothing["choices"]
    assert choice["text"] == PROMPT
    assert choice["finish_reason"] == "length"
    assert nothing["usage"]["completion_tokens"] == 0
    values = choice["logprobs"]["token_logprobs"]
    assert values[0] is None
    assert choice["logprobs"]["tokens"] == list(PROMPT)
    # Of one more token: the same values, then the generated one's, which is the best.
    (more,) = server.complete(PROMPT, max_tokens=1, **fields)["choices"]
    assert more["logprobs"]["token_logprobs"][1:-1] == pytest.approx(values[1:])
    assert more["logprobs"]["text_offset"][-1] == len(PROMPT)
    # The chain rule holds across two requests.
    (shorter,) = server.complete(PROMPT[:-1], max_tokens=0, **fields)["choices"]
    assert shorter["logprobs"]["token_logprobs"][1:] == pytest.approx(values[1:-1], abs=1e-4)


def test_metrics_of_a_request_add_up(server):
    body = server.complete(PROMPT, max_tokens=25, ignore_eos=True)
    metrics = body["metrics"]
    speculation = metrics["speculative_decoding"]
    tree = speculation["tree"]
    assert tree["budget"] == 12
    # The first token belongs to prefill.
    assert tree["num_committed_tokens"] == 24
    assert speculation["mean_acceptance_length"] == 24 / tree["num_rounds"]
    assert sum(speculation["acceptance_histogram"]) == speculation["num_spec_steps"]
    accepted = sum(k * n for k, n in enumerate(speculation["acceptance_histogram"]))
    assert accepted == speculation["num_accepted_draft_tokens"]
    assert sum(tree["num_accepting_per_depth"]) == accepted
    assert metrics["time_to_first_token_ms"] > 0
    assert metrics["tokens_per_second"] > 0


def test_requests_at_once_get_what_each_gets_alone(server):
    prompts = [f"prompt {i} " * (1 + i % 3) for i in range(9)]
    limits = [3, 17, 8, 30, 5, 12, 21, 2, 9]

    async def all_at_once(client):
        bodies = [
            {"prompt": prompt, "max_tokens": limit, "return_token_ids": True}
            for prompt, limit in zip(prompts, limits, strict=True)
        ]
        return await asyncio.gather(*(client.post("/v1/completions", json=b) for b in bodies))

    for prompt, limit, answer in zip(prompts, limits, server.run(all_at_once), strict=True):
        ids = answer.json()["choices"][0]["token_ids"]
        assert ids == reference(list(prompt.encode()), limit)


def test_a_seeded_sample_can_be_had_again_and_choices_differ(server):
    fields = {"max_tokens": 12, "temperature": 1.0, "seed": 5, "n": 2, "ignore_eos": True}
    first, second = (server.complete(PROMPT, **fields)["choices"] for _ in range(2))
    assert first == second
    assert first[0]["text"] != first[1]["text"]
    assert server.complete(PROMPT, max_tokens=12, ignore_eos=True)["choices"][0]["text"] == text_of(
        tiny().reference(IDS, 12)
    )


def test_tokenize_and_detokenize_are_inverse(server):
    body = server.post("/tokenize", {"prompt": PROMPT}).json()
    assert body == {"count": len(IDS), "max_model_len": CONTEXT, "tokens": IDS}
    messages = [{"role": "user", "content": PROMPT}]
    assert server.post("/tokenize", {"messages": messages}).json()["tokens"] == CHAT_IDS
    assert server.post("/detokenize", {"tokens": IDS}).json() == {"prompt": PROMPT}


def test_what_the_server_is_can_be_asked(server):
    (model,) = server.get("/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == ("tiny", CONTEXT)
    assert server.get("/health").status_code == server.get("/ready").status_code == 200
    assert server.get("/version").json()["version"]
    assert server.get("/model_info").json()["is_generation"] is True
    server.complete(PROMPT, max_tokens=8, ignore_eos=True)
    info = server.get("/server_info").json()
    assert info["internal_states"][0]["avg_spec_accept_length"] >= 1
    schema = server.get("/openapi.json").json()
    assert {"/v1/completions", "/v1/chat/completions"} <= schema["paths"].keys()
    assert "CompletionBody" in schema["components"]["schemas"]


def test_every_error_of_a_post_is_in_the_schema(server):
    paths = server.get("/openapi.json").json()["paths"]
    # 405 answers a method that the path does not have, so no operation can name it.
    errors = {str(status) for status in ERROR_TYPES} - {"405"}
    posts = {path: path_item["post"] for path, path_item in paths.items() if "post" in path_item}
    assert len(posts) >= 4
    assert {path: errors - post["responses"].keys() for path, post in posts.items()} == {
        path: set() for path in posts
    }


def test_metrics_page_counts_what_was_served_under_both_names(server):
    def counter(name):
        page = server.get("/metrics").text
        lines = [line for line in page.splitlines() if line.startswith(name + "{")]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    names = ("generation_tokens_total", "spec_decode_num_drafts_total", "prompt_tokens_total",
             "time_to_first_token_seconds_count", "request_success_total")  # fmt: skip
    before = {name: counter(f"vllm:{name}") for name in names}
    body = server.complete(PROMPT, max_tokens=20, ignore_eos=True)
    gained = {name: counter(f"vllm:{name}") - before[name] for name in names}
    assert gained["generation_tokens_total"] == 20
    assert gained["prompt_tokens_total"] == len(IDS)
    assert gained["time_to_first_token_seconds_count"] == gained["request_success_total"] == 1
    steps = body["metrics"]["speculative_decoding"]["num_spec_steps"]
    assert gained["spec_decode_num_drafts_total"] == steps
    for name in names:
        assert counter(f"treespark:{name}") == counter(f"vllm:{name}")
    positions = counter("vllm:spec_decode_num_accepted_tokens_per_pos_total")
    assert positions == counter("vllm:spec_decode_num_accepted_tokens_total")
    assert counter("vllm:num_requests_running") == 0


def test_a_profiled_server_tells_where_the_time_of_its_rounds_went():
    with serving(lambda: tiny_engine(profile=True)) as server:
        start_s = time.perf_counter()
        server.complete(PROMPT, max_tokens=20, ignore_eos=True)
        passed_s = time.perf_counter() - start_s
        page = server.get("/metrics").text
    pattern = r'^treespark:round_seconds_total\{.*phase="(\w+)"\} (\S+)$'
    seconds = {name: float(value) for name, value in re.findall(pattern, page, re.MULTILINE)}
    assert seconds.keys() == {"prefill", "draft", "expand", "verify", "commit", "host"}
    assert min(seconds.values()) > 0
    assert sum(seconds.values()) < passed_s
    (rounds,) = re.findall(r"^treespark:timed_rounds_total\{.*\} (\S+)$", page, re.MULTILINE)
    assert 4 <= float(rounds) <= 19
    assert re.search(r"^treespark:free_slots\{.*\} 4.0$", page, re.MULTILINE)


def test_a_stream_interval_makes_events_of_equal_size():
    with serving(stream_interval=4) as server:
        fields = {"prompt": PROMPT, "max_tokens": 30, "ignore_eos": True}
        plain = server.complete(**fields)["choices"][0]["text"]
        events = server.stream("/v1/completions", return_token_ids=True, **fields)
    sizes = [len(event["choices"][0]["token_ids"]) for event in events]
    assert sizes == [4] * 7 + [2]
    assert "".join(event["choices"][0]["text"] for event in events) == plain


def test_defaults_of_the_server_apply_where_a_request_is_silent():
    with serving(defaults={"temperature": 1.0}, request_metrics=False) as server:
        fields = {"max_tokens": 20, "ignore_eos": True}
        texts = {server.complete(PROMPT, **fields)["choices"][0]["text"] for _ in range(3)}
        assert len(texts) > 1
        greedy = server.complete(PROMPT, temperature=0, **fields)
        assert greedy["choices"][0]["text"] == text_of(tiny().reference(IDS, 20))
        assert greedy["metrics"] is None


def test_events_are_whole_characters(server):
    prompt = "Grüße 안녕 😀"
    events = events_of(
        server.post(
            "/v1/completions",
            {"prompt": prompt, "max_tokens": 60, "stream": True, "ignore_eos": True},
        ).text
    )
    text = "".join(event["choices"][0]["text"] for event in events)
    whole = server.complete(prompt, max_tokens=60, ignore_eos=True)["choices"][0]["text"]
    assert text == whole


def test_a_repeated_prompt_is_counted_as_cached_and_answered_the_same():
    with serving(lambda: tiny_engine(reuse_prefixes=True)) as server:
        first, second = (server.complete(3 * PROMPT, max_tokens=12)["choices"] for _ in range(2))
        assert first == second
        assert server.engine.stats.num_cached_tokens > 0
        assert "vllm:prefix_cache_hits_total" in server.get("/metrics").text
