"""``omni-ray bench`` against ``ramp`` on real Ray Serve: a known pace gives known figures."""

import json
from pathlib import Path
from typing import Any

import pytest

from omni_ray.cli import main
from tests.clock import undisturbed
from tests.conftest import Served, Serving

CONFIG = {
    "stages": {
        "code2wav": {"engine": {"chunk_frames": [3], "allow_request_faults": True, "max_num_seqs": 1}},
        "thinker": {"engine": {"allow_request_faults": True}},
    },
    "ingress": {"max_concurrent_requests": 4},
}
CHUNK_S = 3 * 0.08
"""One word is one chunk of three frames: 0.24 s of sound."""


def bench(app: Served, tmp_path: Path, kind: str, *argv: str, delay_ms: int = 0) -> tuple[int, dict[str, Any]]:
    out = tmp_path / "bench.json"
    faults = json.dumps({"ramp": {"code2wav": {"delay_ms": delay_ms}}})
    common = ["--url", f"{app.url}/v1", "--voice", "a", "--output", str(out), "--extra-body", faults]
    code = main(["bench", kind, *common, *argv])
    return code, json.loads(out.read_text())


def test_slower_than_real_time(serving: Serving, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """8 chunks of 0.24 s, one every 0.3 s: underrun 7 x 0.06 s, RTF 0.3 / 0.24, first sound after 0.3 s."""
    plot = tmp_path / "bench.html"
    arguments = ["--words", "8", "--requests", "2", "--warmup", "1", "--plot", str(plot)]
    app = serving("ramp", CONFIG)

    def in_time(done: tuple[int, Any]) -> bool:
        figures = done[1]["figures"]
        return (
            -0.1 < figures["audio_underrun_s"]["p50"] - 7 * 0.06 < 1  # nothing is faster than its pace, much is slower
            and -0.1 < figures["audio_rtf"]["p50"] - 1.25 < 0.7
            and 0.3 <= figures["audio_ttfp_s"]["p50"] < 1.2
        )

    done = undisturbed(lambda: bench(app, tmp_path, "speech", *arguments, delay_ms=300), in_time)
    code, result = done
    figures = result["figures"]
    assert in_time(done), figures
    assert (code, result["errors"]) == (0, {})
    assert (len(result["requests"]), len(result["warmup"])) == (2, 1)
    assert figures["audio_duration_s"]["p50"] == pytest.approx(8 * CHUNK_S)
    assert figures["audio_continuity_ok_rate"] == 0.0
    assert figures["audio_throughput"] == pytest.approx(2 * 8 * CHUNK_S / figures["wall_s"])
    assert "ttft_s" not in figures
    out = capsys.readouterr().out
    assert "streams without underrun" in out
    assert "errors: 0 of 2" in out
    page = plot.read_text()
    assert page.count("<svg") == 5
    assert "http" not in page.replace("http://127.0.0.1", "").replace("http://www.w3.org", ""), "not self-contained"


def test_faster_than_real_time(serving: Serving, tmp_path: Path) -> None:
    """The same chunks, one every 0.1 s, as a chat: no gap, RTF about 0.42, and text before sound."""
    app = serving("ramp", CONFIG)

    def in_time(done: tuple[int, Any]) -> bool:
        figures = done[1]["figures"]
        smooth = (figures["audio_underrun_s"]["p99"], figures["audio_continuity_ok_rate"]) == (0.0, 1.0)
        return smooth and figures["audio_rtf"]["p50"] < 0.8  # 0.3 s in all for hops and a busy machine

    done = undisturbed(lambda: bench(app, tmp_path, "chat", "--words", "8", "--requests", "2", delay_ms=100), in_time)
    code, result = done
    figures = result["figures"]
    assert in_time(done), figures
    assert code == 0
    assert figures["audio_rtf"]["p50"] >= 0.1 / CHUNK_S
    assert figures["ttft_s"]["p50"] < figures["audio_ttfp_s"]["p50"]
    assert [request["text_tokens"] for request in result["requests"]] == [8, 8]


def test_poisson_overload_is_counted_by_kind(serving: Serving, tmp_path: Path) -> None:
    """24 requests at about 40 a second into a server that takes 4 and needs 0.3 s each: the rest is refused."""
    arguments = ["--words", "1", "--requests", "24", "--warmup", "0", "--rate", "40", "--seed", "3"]
    app = serving("ramp", CONFIG)

    def sent_in_time(done: tuple[int, Any]) -> bool:
        return abs(done[1]["requests"][-1]["sent"] - 24 / 40) < 0.36

    done = undisturbed(lambda: bench(app, tmp_path, "speech", *arguments, delay_ms=300), sent_in_time)
    assert sent_in_time(done), done[1]["requests"]
    code, result = done
    assert code == 1
    assert set(result["errors"]) == {"http_503"}
    refused = result["errors"]["http_503"]["count"]
    assert refused > 4
    assert result["figures"]["e2el_s"]["count"] == 24 - refused
    sent = [request["sent"] for request in result["requests"]]
    assert sent == sorted(sent)


def test_a_stream_that_breaks(serving: Serving, tmp_path: Path) -> None:
    """Chat says it with an event; raw speech breaks off."""
    app = serving("ramp", CONFIG)
    faults = json.dumps({"ramp": {"code2wav": {"fail_at": 2}}})
    for kind, error in [("chat", "stream_error"), ("speech", "cut")]:
        code, result = bench(app, tmp_path, kind, "--words", "8", "--requests", "1", "--extra-body", faults)
        assert (code, list(result["errors"])) == (1, [error])
