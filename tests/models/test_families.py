"""SDXL, SD3 and Flux.1 compute what independent references and diffusers' pipelines compute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import transformers
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import sdbench.models
from sdbench.base.conditions import SIZES
from sdbench.data.batches.tokenizer import CaptionTokenizer, load_carried_tokenizer
from sdbench.models import joint_attention
from sdbench.models.architecture import resolve_architecture
from sdbench.models.flux.family import Flux
from sdbench.models.flux.latents import pack, unpack
from sdbench.models.sd3.family import StableDiffusion3
from sdbench.models.sdxl.family import StableDiffusionXL
from sdbench.models.weights import Weights, draw_weights, initialize_text_encoder
from tests.reference import families as reference
from tests.refusals import refused

FAMILIES = {family.name: family for family in (StableDiffusionXL(), StableDiffusion3(), Flux())}
MINIATURES = {"sdxl": "tiny-sdxl", "sd3": "tiny-sd3", "flux": "tiny-flux"}
CAPTIONS = ["a small red circle!", "the blue cross at the top"]
NEGATIVE = ["blurred"] * 2
NUM_T5_TOKENS = 32
SHARES = torch.tensor([0.25, 0.8])


def configs_of(family: str, size: str) -> dict[str, Any]:
    path = Path(sdbench.models.__path__[0], family, "sizes", f"{size}.json")
    return json.loads(path.read_text(encoding="utf-8"))


def make(family: str, part: str, config: dict[str, Any]) -> Any:
    described = FAMILIES[family]
    name = described.parts[part]
    if part not in described.text_encoders:
        return getattr(diffusers, name).from_config(config)
    part_class = getattr(transformers, name)
    return part_class(part_class.config_class(**config))


def make_all(family: str, **changes: Any) -> dict[str, nn.Module]:
    configs = configs_of(family, MINIATURES[family])
    configs[FAMILIES[family].denoiser] |= changes
    torch.manual_seed(3)
    modules = {part: make(family, part, configs[part]) for part in FAMILIES[family].parts}
    for part, module in modules.items():
        # Biases and norms begin at 0 and 1, which would hide what they are for.
        for weight in module.parameters() if part == FAMILIES[family].denoiser else ():
            weight.data += 0.05 * torch.randn(weight.shape)
        module.eval()
    return modules


def clip_ids(captions: list[str], pad_token_id: int) -> torch.Tensor:
    return torch.from_numpy(CaptionTokenizer(pad_token_id=pad_token_id)(captions))


def t5_ids(captions: list[str]) -> torch.Tensor:
    """ByT5's: a byte is its number and 3, 1 ends a caption, 0 fills it up."""
    rows = [[*(3 + byte for byte in caption.encode()), 1] for caption in captions]
    return torch.tensor([row + [0] * (NUM_T5_TOKENS - len(row)) for row in rows])


def ids_of(family: str, captions: list[str]) -> list[torch.Tensor]:
    first, second, bytes_of = clip_ids(captions, 49407), clip_ids(captions, 0), t5_ids(captions)
    return {
        "sdxl": [first, second],
        "sd3": [first, second, bytes_of],
        "flux": [first, bytes_of],
    }[family]


def encoders_of(family: str, modules: dict[str, nn.Module]) -> list[nn.Module]:
    return [modules[part] for part in FAMILIES[family].text_encoders]


def draw_inputs(family: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    channels = 4 if family == "sdxl" else 16
    latents, noise = torch.randn((2, 2, channels, 8, 8), generator=generator)
    return latents, noise


SIZES_OF_PICTURES = torch.tensor([[480, 640, 0, 12, 64, 64], [64, 64, 0, 0, 64, 64]])
STEPS = [17, 803]


def reference_loss(family: str, modules: dict[str, nn.Module], scale: float | None) -> torch.Tensor:
    latents, noise = draw_inputs(family)
    given = {"latents": latents, "noise": noise, "ids": ids_of(family, CAPTIONS)}
    if family == "sdxl":
        return reference.sdxl_loss(modules, **given, steps=STEPS, sizes=SIZES_OF_PICTURES)
    if family == "sd3":
        return reference.sd3_loss(modules, **given, shares=SHARES)
    return reference.flux_loss(modules, **given, shares=SHARES, scale=scale)


def own_loss(
    family: str, modules: dict[str, nn.Module], more: dict[str, torch.Tensor]
) -> torch.Tensor:
    network = FAMILIES[family].load_network()
    latents, noise = draw_inputs(family)
    if family == "sdxl":
        scheduler = diffusers.DDPMScheduler(**configs_of("sdxl", "tiny-sdxl")["scheduler"])
        times = torch.tensor(STEPS)
        noised, target = scheduler.add_noise(latents, noise, times), noise
        more = {SIZES: SIZES_OF_PICTURES}
    else:
        share = SHARES.view(-1, 1, 1, 1)
        times = 1000 * SHARES
        noised, target = (1 - share) * latents + share * noise, noise - latents
    encoded = network.encode_text(encoders_of(family, modules), ids_of(family, CAPTIONS))
    denoiser = modules[FAMILIES[family].denoiser]
    predicted = network.predict(denoiser, noised, times=times, conditions={**encoded, **more})
    return nn.functional.mse_loss(predicted, target)


def gradients_of(loss: torch.Tensor, module: nn.Module) -> dict[str, torch.Tensor]:
    module.zero_grad()
    loss.backward()
    return {name: weight.grad for name, weight in module.named_parameters()}


@pytest.mark.parametrize(
    ("family", "changes", "more", "scale"),
    [
        ("sdxl", {}, {}, None),
        ("sd3", {}, {}, None),
        ("flux", {}, {}, None),
        ("flux", {"guidance_embeds": True}, {}, 1.0),
        ("flux", {"guidance_embeds": True}, {"guidance": torch.tensor([3.5, 3.5])}, 3.5),
    ],
)
def test_loss_and_gradients_equal_the_reference(family, changes, more, scale) -> None:
    modules = make_all(family, **changes)
    denoiser = modules[FAMILIES[family].denoiser]
    expected_loss = reference_loss(family, modules, scale)
    expected = gradients_of(expected_loss, denoiser)
    found_loss = own_loss(family, modules, more)
    assert found_loss.item() == pytest.approx(expected_loss.item(), rel=1e-6)
    for name, gradient in gradients_of(found_loss, denoiser).items():
        if expected[name] is None:  # the last block of SD3 hands on no text
            assert gradient is None, name
            continue
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6, msg=name)


def make_pipeline(family: str, modules: dict[str, nn.Module]) -> Any:
    described = FAMILIES[family]
    kind = {"ddpm": "DDIMScheduler", "flow": "FlowMatchEulerDiscreteScheduler"}
    scheduler = getattr(diffusers, kind[described.objective])
    config = configs_of(family, MINIATURES[family])
    tokenizers = {
        name: transformers.ByT5Tokenizer()
        if tokenizer == "t5"
        else load_carried_tokenizer(config[name]["pad_token_id"])
        for name, tokenizer in described.tokenizers.items()
    }
    pipeline = getattr(diffusers, described.pipeline)(
        scheduler=scheduler.from_config(config["scheduler"]), **modules, **tokenizers
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_captions_are_encoded_and_drawn_as_by_the_pipeline(family) -> None:
    modules = make_all(family)
    pipeline, network = make_pipeline(family, modules), FAMILIES[family].load_network()
    space = FAMILIES[family].latent_space(modules["vae"].config)
    encoded, negative = (
        network.encode_text(encoders_of(family, modules), ids_of(family, captions))
        for captions in (CAPTIONS, NEGATIVE)
    )
    lengths = {} if family == "sdxl" else {"max_sequence_length": NUM_T5_TOKENS}
    given = {
        "latents": space.pack(draw_inputs(family)[1]),
        **{"height": 64, "width": 64, "num_inference_steps": 2, "output_type": "latent"},
        **network.guidance_arguments(3.0, told=None),
    }
    expected = pipeline(prompt=CAPTIONS, negative_prompt=NEGATIVE, **lengths, **given).images
    arguments = network.pipeline_arguments(encoded, negative)
    found = pipeline(**arguments, **given).images
    assert torch.equal(found, expected)
    without = pipeline(**arguments, **given | network.guidance_arguments(1.0, told=None)).images
    assert not torch.allclose(found, without)
    unpacked = space.unpack(found, height=8, width=8)
    assert unpacked.shape == draw_inputs(family)[1].shape
    assert torch.equal(space.pack(unpacked), found)


@torch.no_grad()
def test_sd3_without_t5_is_told_what_the_pipeline_tells_it() -> None:
    modules = make_all("sd3", joint_attention_dim=4096)
    pipeline = make_pipeline("sd3", modules | {"text_encoder_3": None})
    expected, _, pooled, _ = pipeline.encode_prompt(
        CAPTIONS, None, None, do_classifier_free_guidance=False, max_sequence_length=77
    )
    encoders, ids = encoders_of("sd3", modules)[:2], ids_of("sd3", CAPTIONS)[:2]
    found = StableDiffusion3().load_network().encode_text(encoders, ids)
    assert torch.equal(found["text_embedding"], expected)
    assert torch.equal(found["pooled_embedding"], pooled)


def test_packs_are_those_of_the_pipeline() -> None:
    latents = torch.randn(2, 16, 8, 6)
    packed = diffusers.FluxPipeline._pack_latents(latents, 2, 16, 8, 6)
    assert torch.equal(pack(latents), packed)
    assert torch.equal(unpack(packed, height=8, width=6), latents)


COUNTS = {
    ("sdxl", "sdxl"): {
        "unet": 2_567_463_684,
        "vae": 83_653_863,
        "text_encoder": 123_060_480,
        "text_encoder_2": 694_659_840,
    },
    ("sd3", "sd3-medium"): {
        "transformer": 2_028_328_000,
        "vae": 83_819_683,
        "text_encoder": 123_650_304,
        "text_encoder_2": 694_659_840,
        "text_encoder_3": 4_762_310_656,
    },
    ("flux", "flux-schnell"): {
        "transformer": 11_891_178_560,
        "vae": 83_819_683,
        "text_encoder": 123_060_480,
        "text_encoder_2": 4_762_310_656,
    },
    ("flux", "flux-dev"): {"transformer": 11_901_408_320},
}


@pytest.mark.parametrize(("family", "size"), COUNTS)
def test_real_sizes_have_the_published_numbers_of_weights(family, size) -> None:
    configs = configs_of(family, size)
    with torch.device("meta"):
        for part, count in COUNTS[family, size].items():
            module = make(family, part, configs[part])
            assert sum(weight.numel() for weight in module.parameters()) == count, part


def test_fewer_blocks_have_the_full_width() -> None:
    config = resolve_architecture("flux-schnell-2+3-blocks").parts["transformer"]
    with torch.device("meta"):
        denoiser = make("flux", "transformer", config)
    # By hand for the width w = 3072: a double block has 36 w^2 + 30 w + 512 weights, a single one
    # 15 w^2 + 11 w + 256.
    left_out = 17 * 339_831_296 + 35 * 141_591_808
    found = sum(weight.numel() for weight in denoiser.parameters())
    assert found == COUNTS["flux", "flux-schnell"]["transformer"] - left_out


def flops_of(family: str, size: str, *, side: int, num_tokens: int) -> int:
    """Operations of the denoiser for one picture, forward, as torch counts them."""
    configs, described = configs_of(family, size), FAMILIES[family]
    config = configs[described.denoiser]
    with torch.device("meta"):
        denoiser = make(family, described.denoiser, config)
        width = config.get("joint_attention_dim") or config["cross_attention_dim"]
        conditions = {
            "text_embedding": torch.zeros(1, num_tokens, width),
            "pooled_embedding": torch.zeros(1, config.get("pooled_projection_dim", 1280)),
            SIZES: torch.zeros(1, 6),
        }
        noised = torch.zeros(1, configs["vae"]["latent_channels"], side // 8, side // 8)
        network = described.load_network()
        network.set_attention(denoiser, "eager")
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            network.predict(denoiser, noised, times=torch.zeros(1), conditions=conditions)
    return counter.get_total_flops()


def products_of_flux(pixels: int, text: int) -> int:
    """Multiplications of Flux.1 schnell for so many tokens, counted by hand."""
    width, both = 3072, pixels + text
    scores_and_sums = 2 * both**2 * width
    # Keys, queries, values (3), output (1) and a network of four widths (8).
    double = 12 * width**2 * both + scores_and_sums + 2 * 6 * width**2
    single = 12 * width**2 * both + scores_and_sums + 3 * width**2
    outer = 2 * 64 * width * pixels + 4096 * width * text
    times_and_text = (256 + width) * width + (768 + width) * width + 2 * width**2
    return 19 * double + 38 * single + outer + times_and_text


def products_of_sd3(pixels: int, text: int) -> int:
    """The same for SD3 medium, whose last block does not hand on the text."""
    width, both = 1536, pixels + text
    block = 12 * width**2 * both + 2 * both**2 * width + 2 * 6 * width**2
    not_in_last = 9 * width**2 * text + 4 * width**2
    outer = 2 * 64 * width * pixels + 4096 * width * text
    times_and_text = (256 + width) * width + (2048 + width) * width + 2 * width**2
    return 24 * block - not_in_last + outer + times_and_text


@pytest.mark.slow
@pytest.mark.parametrize("side", [256, 1024])
def test_operations_of_transformers_equal_a_count_by_hand(side) -> None:
    pixels = (side // 16) ** 2
    found = flops_of("flux", "flux-schnell", side=side, num_tokens=256)
    assert found == 2 * products_of_flux(pixels, 256)
    found = flops_of("sd3", "sd3-medium", side=side, num_tokens=154)
    assert found == 2 * products_of_sd3(pixels, 154)


def products_of_sdxl(pixels: int) -> int:
    """The same for SDXL, for so many pixels of its latents and 77 tokens."""
    half, quarter = pixels // 4, pixels // 16
    down = 2 * residual(320, 320, pixels) + 9 * 320**2 * half
    down += residual(320, 640, half) + residual(640, 640, half) + 2 * attend(640, half, depth=2)
    down += 9 * 640**2 * quarter + residual(640, 1280, quarter) + residual(1280, 1280, quarter)
    down += 2 * attend(1280, quarter, depth=10)
    middle = 2 * residual(1280, 1280, quarter) + attend(1280, quarter, depth=10)
    up = 2 * residual(2560, 1280, quarter) + residual(1920, 1280, quarter)
    up += 3 * attend(1280, quarter, depth=10) + 9 * 1280**2 * half
    up += residual(1920, 640, half) + residual(1280, 640, half) + residual(960, 640, half)
    up += 3 * attend(640, half, depth=2) + 9 * 640**2 * pixels
    up += residual(960, 320, pixels) + 2 * residual(640, 320, pixels)
    outer = 2 * 9 * 4 * 320 * pixels
    times_and_sizes = 320 * 1280 + 1280**2 + 2816 * 1280 + 1280**2
    return down + middle + up + outer + times_and_sizes


def residual(inner: int, outer: int, pixels: int) -> int:
    """Two convolutions of 3 x 3, one of 1 x 1 beside them, and the embedded time."""
    shortcut = inner * outer if inner != outer else 0
    return (9 * inner * outer + 9 * outer**2 + shortcut) * pixels + 1280 * outer


def attend(width: int, pixels: int, *, depth: int) -> int:
    """Transformer layers between two projections, with 77 states of 2,048 numbers."""
    itself = 4 * width**2 * pixels + 2 * pixels**2 * width
    text = 2 * width**2 * pixels + 2 * 2048 * width * 77 + 2 * 77 * pixels * width
    return 2 * width**2 * pixels + depth * (itself + text + 12 * width**2 * pixels)


@pytest.mark.slow
@pytest.mark.parametrize("side", [256, 1024])
def test_operations_of_sdxl_equal_a_count_by_hand(side) -> None:
    found = flops_of("sdxl", "sdxl", side=side, num_tokens=77)
    assert found == 2 * products_of_sdxl((side // 8) ** 2)


@pytest.mark.parametrize("family", ["sd3", "flux"])
def test_all_kinds_of_attention_give_the_same(family, monkeypatch) -> None:
    modules = make_all(family)
    denoiser, network = modules["transformer"], FAMILIES[family].load_network()
    with torch.no_grad():
        expected = own_loss(family, modules, {})
        for kind in ("eager", "by_shape", "sdpa", "flash"):
            network.set_attention(denoiser, kind)
            assert own_loss(family, modules, {}).item() == pytest.approx(expected.item(), rel=1e-5)
        network.set_attention(denoiser, "cudnn")
        with pytest.raises(RuntimeError):  # no such kernel on a CPU
            own_loss(family, modules, {})
    kernels = []
    monkeypatch.setattr(joint_attention, "sdpa_kernel", lambda kernel: kernels.append(kernel))
    short = joint_attention.JointAttnProcessor(None, "by_shape")
    assert short._kernels(1024) is None and len(kernels) == 1
    assert short._kernels(1025) is not None and len(kernels) == 1
    allowed = "eager | by_shape | sdpa | flash | cudnn | efficient"
    with refused("--attention", value="xformers", allowed=allowed):
        network.set_attention(denoiser, "xformers")


@pytest.fixture
def nan_in_fresh_memory():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("family", "part"),
    [(family, part) for family in FAMILIES for part in FAMILIES[family].parts],
)
def test_drawn_weights_have_the_distributions_of_the_constructor(
    family, part, nan_in_fresh_memory
) -> None:
    config = configs_of(family, MINIATURES[family])[part]
    torch.manual_seed(5)
    expected = make(family, part, config)
    with torch.device("meta"):
        drawn = make(family, part, config)
    is_text = part in FAMILIES[family].text_encoders
    is_denoiser = part == FAMILIES[family].denoiser
    draw_weights(
        drawn,
        Weights(seed=3),
        initialize=initialize_text_encoder(drawn) if is_text else None,
        fill_buffers=FAMILIES[family].load_network().fill_buffers if is_denoiser else None,
    )
    others = dict(expected.named_parameters())
    assert dict(drawn.named_parameters()).keys() == others.keys()
    for name, weight in drawn.named_parameters():
        other = others[name]
        assert weight.isfinite().all(), name
        if other.min() == other.max():
            assert torch.equal(weight, other), name
        elif weight.numel() >= 512:
            assert weight.std().item() == pytest.approx(other.std().item(), rel=0.2), name
    buffers = dict(expected.named_buffers())
    assert dict(drawn.named_buffers()).keys() == buffers.keys()
    for name, buffer in drawn.named_buffers():
        assert torch.equal(buffer, buffers[name]), name


def test_an_embedding_at_two_places_is_drawn_once_and_stays_one(monkeypatch) -> None:
    placed, place = [], Weights.place

    def note(weights: Weights, part: nn.Module) -> None:
        place(weights, part)
        placed.extend(part.parameters())

    monkeypatch.setattr(Weights, "place", note)
    with torch.device("meta"):
        drawn = make("flux", "text_encoder_2", configs_of("flux", "tiny-flux")["text_encoder_2"])
    draw_weights(drawn, Weights(seed=3), initialize=initialize_text_encoder(drawn))
    assert drawn.encoder.embed_tokens.weight is drawn.shared.weight
    assert len(placed) == len(list(drawn.parameters()))


def test_norms_of_sd3_5_are_drawn_as_ones() -> None:
    config = configs_of("sd3", "tiny-sd3")["transformer"] | {"qk_norm": "rms_norm"}
    with torch.device("meta"):
        drawn = make("sd3", "transformer", config)
    network = StableDiffusion3().load_network()
    draw_weights(drawn, Weights(seed=3), fill_buffers=network.fill_buffers)
    norms = [w for name, w in drawn.named_parameters() if name.endswith("norm_q.weight")]
    assert norms and all(torch.equal(norm, torch.ones_like(norm)) for norm in norms)


def test_an_unknown_buffer_is_not_left_empty() -> None:
    with torch.device("meta"):
        drawn = make("sd3", "transformer", configs_of("sd3", "tiny-sd3")["transformer"])
    with pytest.raises(AssertionError, match=r"not known: \[.pos_embed\.pos_embed"):
        draw_weights(drawn, Weights(seed=3))


@pytest.mark.parametrize(("family", "size"), [(f, MINIATURES[f]) for f in FAMILIES])
def test_blocks_to_shard_and_compile_are_in_the_model(family, size) -> None:
    network = FAMILIES[family].load_network()
    modules = make_all(family)
    denoiser = modules[FAMILIES[family].denoiser]
    for kinds, models in (
        (network.sharded_blocks, [denoiser]),
        (network.compiled_blocks, modules.values()),
    ):
        found = [m for model in models for m in model.modules() if isinstance(m, kinds)]
        assert {type(module) for module in found} == set(kinds)
        inner = [m for outer in found for m in outer.modules() if m is not outer]
        assert not [module for module in inner if isinstance(module, kinds)]
