"""Traces and logs of real requests on real Serve: a complete tree at an OTLP collector, our ids on every log line."""

import asyncio
import itertools
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.conftest import COLLECTOR_PORT, Served, Serving, wait_until

TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SECRET = "zanzibar"
LOGS = {"logging_config": {"encoding": "JSON"}}
CONFIG: dict[str, Any] = {
    "stages": {
        "thinker": {"deployment": {**LOGS, "num_replicas": 2}},
        "talker": {"deployment": LOGS},
        "code2wav": {
            "deployment": LOGS,
            "engine": {"chunk_frames": [3], "max_num_seqs": 1, "reserved_seqs": 0, "allow_request_faults": True},
        },
    },
    "ingress": {"deployment": LOGS},
    "observe": {"tracing": True},
}
"""Shared with ``test_top``."""


class Collector(ThreadingHTTPServer):
    """An OTLP endpoint that keeps what it is sent."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", COLLECTOR_PORT), _Receiver)
        self.spans: list[Span] = []

    def of(self, trace_id: str) -> list[Span]:
        return [span for span in self.spans if span.trace_id.hex() == trace_id]


class _Receiver(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        sent = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
        self.server.spans += [s for r in sent.resource_spans for scope in r.scope_spans for s in scope.spans]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Quiet."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {
        "model": "ramp", "messages": [{"role": "user", "content": text}], "modalities": ["text", "audio"],
        "audio": {"voice": "a", "format": "pcm16"}, "stream": True, **more,
    }  # fmt: skip


async def ask(app: Served, body: dict[str, Any], **headers: str) -> str:
    async with app.async_client() as client:
        return (await client.post("/v1/chat/completions", json=body, headers=headers)).text


def attribute(span: Span, name: str) -> Any:
    (value,) = [a.value for a in span.attributes if a.key == f"omni_ray.{name}"]
    return value.string_value or value.int_value or value.double_value


async def test_one_request_one_tree(serving: Serving, collector: Collector) -> None:
    """client -> request -> code2wav -> talker -> thinker; queue, upstream, prefill and hops inside, in order."""
    app = serving("ramp", CONFIG)
    await ask(app, chat("one two three"), traceparent=f"00-{TRACE_ID}-{PARENT_ID}-01")
    stages = ("request", "code2wav", "talker", "thinker")
    await asyncio.to_thread(wait_until, lambda: {s.name for s in collector.of(TRACE_ID)} >= {*stages})
    spans = collector.of(TRACE_ID)
    (chain,) = [[next(s for s in spans if s.name == name) for name in stages]]
    assert chain[0].parent_span_id.hex() == PARENT_ID
    for consumer, producer in itertools.pairwise(chain):
        assert producer.parent_span_id == consumer.span_id
        hops = [s for s in spans if s.name == "hop" and s.parent_span_id == consumer.span_id]
        assert {attribute(hop, "from_stage") for hop in hops} == {producer.name}
        assert all(0 <= hop.end_time_unix_nano - hop.start_time_unix_nano < 5e9 for hop in hops)
    for stage in chain[1:]:
        names = ["queue", "prefill"] if stage.name == "thinker" else ["queue", "upstream", "prefill"]
        inside = [next(s for s in spans if s.name == n and s.parent_span_id == stage.span_id) for n in names]
        assert all(a.end_time_unix_nano == b.start_time_unix_nano for a, b in itertools.pairwise(inside))
        assert all(s.start_time_unix_nano <= s.end_time_unix_nano for s in inside)
        assert stage.start_time_unix_nano <= inside[0].start_time_unix_nano
        assert inside[-1].end_time_unix_nano <= stage.end_time_unix_nano
        assert attribute(stage, "outcome") == "finished"
    assert len({attribute(span, "request_id") for span in chain}) == 1
    assert {event.name for event in chain[0].events} == {"first audio", "first text"}
    assert attribute(chain[0], "audio_seconds") == pytest.approx(0.72)
    assert attribute(chain[1], "audio_tokens") == 9
    known = {span.span_id for span in spans} | {bytes.fromhex(PARENT_ID)}
    assert all(span.parent_span_id in known for span in spans), "a span hangs in the air"
    assert SECRET not in str(spans)


async def test_a_client_that_is_not_sampled_is_not_traced(serving: Serving, collector: Collector) -> None:
    """The client's own decision (flags 00) counts; the next request, without a header, is traced by itself."""
    app = serving("ramp", CONFIG)
    not_sampled = TRACE_ID.replace("4", "5")
    await ask(app, chat("one"), traceparent=f"00-{not_sampled}-{PARENT_ID}-00")
    failed = await ask(app, chat(f"{SECRET} two", ramp={"code2wav": {"fail_at": 1}}))
    assert "error" in failed
    await asyncio.to_thread(wait_until, lambda: any(s.name == "request" for s in collector.spans))
    assert not collector.of(not_sampled)
    (request,) = [s for s in collector.spans if s.name == "request"]
    assert not request.parent_span_id
    assert attribute(request, "outcome") == "failed"
    assert request.status.code == request.status.STATUS_CODE_ERROR


async def test_log_lines_are_json_with_our_ids_and_nothing_that_was_said(serving: Serving) -> None:
    """Every line of a replica names stage and pipeline; lines about a request its id; none holds the text."""
    app = serving("ramp", CONFIG)
    failed = await ask(app, chat(f"{SECRET} two", ramp={"code2wav": {"fail_at": 1}}), **{"x-request-id": "log-test"})
    assert "error" in failed

    def of_this_request(lines: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Its last line, by the client's id; and the line of the stage that failed, by ours."""
        ended = [line for line in lines if line.get("client_id") == "log-test"]
        failures = [line for line in lines if line["message"].startswith("stage code2wav failed")]
        return ended, [f for f in failures for e in ended if f["request_id"] == e["request_id"]]

    lines = await asyncio.to_thread(log_lines, app, lambda lines: all(of_this_request(lines)))
    assert {line["pipeline"] for line in lines if "pipeline" in line} == {"ramp"}
    assert {line["stage"] for line in lines if "stage" in line} == {"ingress", *app.stages()}
    (ended,), (failure,) = of_this_request(lines)
    assert (failure["stage"], ended["stage"]) == ("code2wav", "ingress")
    assert (ended["path"], ended["status"]) == ("/v1/chat/completions", 200)
    assert SECRET not in json.dumps(lines)


async def test_content_is_logged_where_asked(serving: Serving) -> None:
    together = {"colocate": ["thinker", "talker", "code2wav"]}  # sooner there than four processes
    app = serving("ramp", {**together, "observe": {"log_content": True}, "ingress": {"deployment": LOGS}})
    await ask(app, chat(f"{SECRET} three"))
    lines = await asyncio.to_thread(log_lines, app, lambda lines: any("content" in line for line in lines))
    (line,) = [line for line in lines if line["message"].startswith("content of request")]
    assert line["content"] == [{"role": "user", "text": f"{SECRET} three"}]


def log_lines(app: Served, complete: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
    """All lines of the application's replicas, once they are ``complete``; Serve writes them a little later."""
    import ray

    folder = Path(ray._private.worker._global_node.get_logs_dir_path()) / "serve"
    lines: list[dict[str, Any]] = []

    def read() -> bool:
        texts = [path.read_text() for path in folder.glob(f"replica_{app.name}_*.log")]
        lines[:] = [json.loads(line) for text in texts for line in text.splitlines() if line.startswith("{")]
        return complete(lines)

    wait_until(read)
    return lines
