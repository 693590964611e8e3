"""Videos in chats: what reaches the stages, and what is refused before anything starts."""

from itertools import combinations
from typing import Any

import pytest
from api_fakes import TEXT_ONLY, FakeDispatcher, b64, check_error, client_of, text

from omni_ray.config.ingress import IngressConfig
from omni_ray.config.pipeline import Edge, PipelineConfig, RequestPart, StageExecutionType, StagePipelineConfig
from omni_ray.engine.types import AudioClip, MediaPart, TextPart, VideoClip
from tests.videos import grey, hum, made_video

URL = "/v1/chat/completions"
MEDIA: tuple[RequestPart, ...] = ("input_audio", "input_video")
PARAM = "messages[0].content[1].video_url.url"


def watching(*media: RequestPart) -> PipelineConfig:
    taken = [("messages", *some) for count in range(len(media) + 1) for some in combinations(media, count)]
    edges = tuple(Edge(source="request", processor="x:y", parts=parts) for parts in taken)
    stage = StagePipelineConfig(
        name="thinker",
        execution_type=StageExecutionType.LLM_AR,
        model_arch="X",
        final_output_type="text",
        inputs=edges,
    )
    return PipelineConfig(name="watching", description="test", stages=(stage,))


def body(data: bytes | str, **more: Any) -> dict[str, Any]:
    url = data if isinstance(data, str) else f"data:video/mp4;base64,{b64(data)}"
    content = [{"type": "text", "text": "look"}, {"type": "video_url", "video_url": {"url": url}}]
    return {"model": "m", "messages": [{"role": "user", "content": content}], **more}


async def post(fake: FakeDispatcher, sent: Any) -> Any:
    async with client_of(fake) as client:
        return await client.post(URL, json=sent)


HEARD = {"mm_processor_kwargs": {"use_audio_in_video": True}}


@pytest.mark.parametrize("heard", [False, True])
async def test_frames_and_sound_reach_the_stages(heard: bool) -> None:
    fake = FakeDispatcher(watching(*MEDIA), text("ok"))
    response = await post(fake, body(made_video(sound=hum(2)), **(HEARD if heard else {})))
    assert response.status_code == 200, response.text
    assert "x-omni-ray-ignored" not in response.headers
    (request,), (clips,) = fake.requests, fake.clips
    assert request.messages[0].content == (TextPart("look"), MediaPart("video", 0))
    assert [type(clip) for clip in clips] == [VideoClip, AudioClip][: 1 + heard]
    assert {clip.index for clip in clips} == {0}
    assert isinstance(clips[0], VideoClip)
    assert clips[0].fps == 2
    assert abs(clips[0].frames.mean((1, 2, 3)) - [grey(n) for n in (0, 15, 30, 45)]).max() < 2
    assert fake.plans[0].stages[0].edges == ((3,) if heard else (2,))


@pytest.mark.parametrize(
    ("video", "field"),
    [
        ({}, ""),
        ({"video_url": "data:"}, ""),
        ({"video_url": {"url": 1}}, ".url"),
        ({"video_url": {"url": "http://127.0.0.1:8265/a.mp4"}}, ".url"),
        ({"video_url": {"url": "file:///etc/passwd"}}, ".url"),
        ({"video_url": {"url": "data:video/mp4;base64,???"}}, ".url"),
        ({"video_url": {"url": "data:video/mp4;base64,AAAA"}}, ".url"),
    ],
)
async def test_refused_before_anything_starts(video: Any, field: str) -> None:
    """C06, C54: nothing is fetched, and what is no video is said to be none."""
    fake = FakeDispatcher(watching(*MEDIA), text("ok"))
    sent = {"model": "m", "messages": [{"role": "user", "content": [{"type": "video_url", **video}]}]}
    check_error(await post(fake, sent), 400, f"messages[0].content[0].video_url{field}")
    assert not fake.requests


async def test_a_silent_video_is_refused_where_it_should_be_heard() -> None:
    fake = FakeDispatcher(watching(*MEDIA), text("ok"))
    error = check_error(await post(fake, body(made_video(frames=8), **HEARD)), 400, PARAM)
    assert "use_audio_in_video" in error["message"]
    assert not fake.requests


async def test_a_pipeline_without_eyes_or_ears_says_so() -> None:
    data = made_video(frames=8, sound=hum(0.3))
    for pipeline, sent, missing in (
        (TEXT_ONLY, body(data), "input_video"),
        (watching("input_video"), body(data, **HEARD), "input_audio"),
    ):
        fake = FakeDispatcher(pipeline, text("ok"))
        assert missing in check_error(await post(fake, sent), 400, "messages")["message"]
        assert not fake.requests


async def test_other_processor_options_are_refused_and_needless_ones_named() -> None:
    fake = FakeDispatcher(watching(*MEDIA), text("ok"))
    data = made_video(frames=8)
    sent = body(data, mm_processor_kwargs={"use_audio_in_video": False, "fps": 1})
    check_error(await post(fake, sent), 400, "mm_processor_kwargs.fps")
    sent = body(data, mm_processor_kwargs={"use_audio_in_video": "yes"})
    check_error(await post(fake, sent), 400, "mm_processor_kwargs.use_audio_in_video")
    plain = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **HEARD}
    assert (await post(fake, plain)).headers["x-omni-ray-ignored"] == "mm_processor_kwargs"


async def test_c55_videos_are_bounded() -> None:
    data = made_video(frames=60)
    two = body(data)
    two["messages"][0]["content"].append(two["messages"][0]["content"][1])
    for config, sent, status, param, said in (
        (IngressConfig(max_video_seconds=1), body(data), 400, PARAM, "1 seconds"),
        (IngressConfig(max_video_mpixels=0.02), two, 400, PARAM.replace("[1]", "[2]"), "megapixels"),
        (IngressConfig(max_audio_mb=0.001), body(data), 413, PARAM, "MB"),
    ):
        fake = FakeDispatcher(watching(*MEDIA), text("ok"), config=config)
        assert said in check_error(await post(fake, sent), status, param)["message"]
        assert not fake.requests
    assert (await post(FakeDispatcher(watching(*MEDIA), text("ok")), two)).status_code == 200
