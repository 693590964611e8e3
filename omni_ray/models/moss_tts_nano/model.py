"""MOSS-TTS-Nano through its checkpoint's own ``inference_stream`` (MODEL-INV-003: upstream's code as it is).

transformers' auto classes load that code; the model, its tokenizer and its codec are upstream's.

Its events are dictionaries: ``{"type": "audio", "waveform": [channels, n]}`` as sound comes, and at the end
``{"type": "result", "waveform": ...}`` with everything once more.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import soundfile
import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from omni_ray.config.sampling import SamplingParams
from omni_ray.engine.generator import GeneratorModel
from omni_ray.engine.generator_run import Job, Piece
from omni_ray.engine.reference_voice import reference_voice
from omni_ray.engine.types import Request
from omni_ray.errors import ConfigError
from omni_ray.models.moss_tts_nano.options import MossOptions

SAMPLE_RATE: Final = 48_000
SAMPLES_PER_FRAME: Final = 3_840
"""12.5 frames a second."""


class MossTTSNano(GeneratorModel):
    """Text in; float32 pieces [channels, n] at 48 kHz out. The codec's decoding state is shared by all generators."""

    sample_rate = SAMPLE_RATE
    samples_per_token = SAMPLES_PER_FRAME

    def load(self) -> None:
        """Load the language model and its codec by the code that lies beside their weights, and speak a word.

        Raises:
            ConfigError: no model, ``trust_remote_code`` is off, or a tensor is missing, unexpected or not finite.
        """
        options = self.context.options
        assert isinstance(options, MossOptions)
        name = self.context.stage.name
        if self.context.model is None:
            raise ConfigError([f"stage {name} needs a model directory or hub id"])
        if not options.trust_remote_code:
            fix = f"set stages.{name}.engine.trust_remote_code: true if you trust whoever wrote it"
            raise ConfigError([f"{self.context.model} is computed by Python code inside the checkpoint; {fix}"])
        torch.set_num_threads(options.threads)
        self._directory, self._device = self.context.model, torch.device(options.device)
        config: Any = AutoConfig.from_pretrained(self._directory, trust_remote_code=True)
        if config.audio_tokenizer_sample_rate != SAMPLE_RATE:
            raise ConfigError([f"{self._directory}: speaks at {config.audio_tokenizer_sample_rate} Hz, not 48000"])
        codec = options.audio_tokenizer or str(config.audio_tokenizer_pretrained_name_or_path)
        beside = Path(self._directory) / codec
        dtype: torch.dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[
            options.dtype
        ]
        self._lm = self._loaded(AutoModelForCausalLM, self._directory, dtype)
        self._codec = self._loaded(AutoModel, str(beside) if beside.is_dir() else codec, torch.float32)
        self.context.progress("weights are loaded")
        warm_up = Request("warm-up", seed=0, sampling=SamplingParams(max_tokens=2))
        with tempfile.TemporaryDirectory() as scratch:
            for _ in self.speak(Job(warm_up, ["Hello."], Path(scratch))):
                pass

    def _loaded(self, auto: Any, source: str, dtype: torch.dtype) -> Any:
        if self.context.load_format == "dummy":
            config = AutoConfig.from_pretrained(source, trust_remote_code=True)
            model: nn.Module = auto.from_config(config, trust_remote_code=True, dtype=dtype)
            return model.to(self._device).eval()
        model, info = auto.from_pretrained(source, trust_remote_code=True, dtype=dtype, output_loading_info=True)
        problems = [f"{source}: {kind} {sorted(map(str, found))[:5]}" for kind, found in info.items() if found]
        # rotary tables of remote code are built on the meta device and can come out as whatever memory held
        tensors = (*model.named_parameters(), *model.named_buffers())
        broken = [key for key, tensor in tensors if tensor.is_floating_point() and not tensor.isfinite().all()]
        problems += [f"{source}: {key} is not finite after loading" for key in broken]
        if problems:
            raise ConfigError(problems)
        return model.to(self._device).eval()

    @torch.inference_mode()
    def speak(self, job: Job) -> Iterator[Piece]:
        """See ``GeneratorModel.speak``. A recording with its text is continued, one without is imitated."""
        (text,) = job.inputs
        sampling, recording = job.request.sampling, None
        reference = reference_voice(job.request.extras, SAMPLE_RATE)
        if reference is not None:
            recording = job.scratch / "reference.wav"
            soundfile.write(recording, reference.samples, SAMPLE_RATE)
        said = None if reference is None else reference.text
        most = int(job.request.max_audio_seconds * SAMPLE_RATE / SAMPLES_PER_FRAME) + 1  # the engine cuts exactly
        events: Iterator[dict[str, Any]] = self._lm.inference_stream(
            text=text,
            output_audio_path=str(job.scratch / "answer.wav"),
            mode="voice_clone" if reference is not None and said is None else "continuation",
            prompt_text=said,
            prompt_audio_path=None if recording is None else str(recording),
            text_tokenizer_path=self._directory,
            audio_tokenizer=self._codec,
            device=self._device,
            nq=None,
            max_new_frames=min(most, sampling.max_tokens or most),
            do_sample=sampling.temperature != 0,
            use_kv_cache=True,
            audio_temperature=sampling.temperature or 1.0,
            audio_top_p=1.0 if sampling.top_p is None else sampling.top_p,
            audio_top_k=sampling.top_k or 0,
            audio_repetition_penalty=sampling.repetition_penalty or 1.0,
        )
        for event in events:
            kind, waveform = event.get("type"), event.get("waveform")
            if kind in ("audio", "result") and waveform is not None:
                samples = torch.as_tensor(waveform).detach().to("cpu", torch.float32)
                yield Piece(samples.numpy(), whole=kind == "result")
