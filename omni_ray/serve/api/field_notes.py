"""What the OpenAPI document says of request fields, in the same words on every route."""

from collections.abc import Mapping
from typing import Final

_REFUSED: Final = "cannot be honoured here: a value that would change the answer is refused"

NOTES: Final[Mapping[str, str]] = {
    "model": "the served model's id, as GET /v1/models lists it",
    "stream": "server-sent events, as the answer is made",
    "seed": "the same seed draws the same noise; drawn by the server if left out",
    "temperature": "0 takes the most likely token each time",
    "top_p": "draw from the fewest tokens whose probabilities add up to this",
    "top_k": "draw from so many of the most likely tokens",
    "repetition_penalty": "above 1, what was said before becomes less likely",
    "language": "of what is said, an ISO 639-1 code",
    # chat
    "messages": "the chat so far; media stand in it as base64, or as URLs of hosts that the server allows",
    "audio": "the speech's voice and format: pcm16 if streamed, else wav, unless said otherwise",
    "mm_processor_kwargs": "vLLM's; use_audio_in_video hears the sound of all videos",
    "stream_options": "include_usage: one last event with the usage",
    "max_tokens": "most tokens of the answer's text",
    "max_completion_tokens": "another name of max_tokens",
    "stop": "texts that end the answer and are no part of it",
    "ignore_eos": "go on to max_tokens, whatever the model says",
    "n": "1",
    "frequency_penalty": _REFUSED,
    "presence_penalty": _REFUSED,
    "logprobs": _REFUSED,
    "top_logprobs": _REFUSED,
    "logit_bias": _REFUSED,
    "response_format": 'only {"type": "text"}',
    "tools": _REFUSED,
    "tool_choice": _REFUSED,
    "functions": _REFUSED,
    "function_call": _REFUSED,
    "web_search_options": _REFUSED,
    # speech
    "input": "what is said",
    "voice": 'one that GET /v1/audio/voices lists, or {"id": one}; the default voice if left out',
    "speed": "1 is the voice's own; a model may take less than this range",
    "sample_rate": "of the answer, in Hz; the model's own if left out",
    "instructions": "ignored, and named in the header x-omni-ray-ignored",
    "extra_params": "vLLM-Omni's place for temperature, top_p, top_k, repetition_penalty and max_tokens",
    "max_new_tokens": "most tokens of the answer; in extra_params it is max_tokens",
    # transcriptions
    "file": "the recording: wav, flac, mp3 or ogg",
    # pictures
    "prompt": "what is painted",
    "size": "WIDTHxHEIGHT in pixels, or auto: the model's own",
    "output_format": "png if left out",
    "background": "opaque, whatever is said",
    "negative_prompt": "what is not painted",
    "num_inference_steps": "of the denoising; the model's own number if left out",
    "guidance_scale": "how closely the prompt is followed; the model's own if left out",
    "true_cfg_scale": "the same, by classifier-free guidance, of models that know both",
}
"""By the field's name; a description beside the field itself wins."""
