"""A target's compiled parts against transformers' own forward, on the CPU with dynamo's eager backend."""
import pytest
import torch
import transformers

from common import VOCAB
from dflash_trainer import fp8
from dflash_trainer.compiled_target import CompiledParts, GatedDeltaNet
from dflash_trainer.features import TappedForward
from test_families import FAMILIES, SHAPE


def transformers_delta_rule(query, key, value, **options):
    """transformers' own function; its oldest version here wants equal numbers of heads."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as code
    groups = value.shape[2] // key.shape[2]
    return code.torch_chunk_gated_delta_rule(
        query.repeat_interleave(groups, 2), key.repeat_interleave(groups, 2), value, **options)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def decoder_of(family):
    torch.manual_seed(0)
    decoder = FAMILIES[family]().eval().requires_grad_(False).get_decoder()
    for parameter in decoder.parameters():  # norms of ones and gates of zeros would hide a forgotten factor
        parameter.add_(0.1 * torch.randn_like(parameter))
    return decoder


KINDS = {"llama": {"attention", "MLP", "norm"}, "qwen3": {"attention", "MLP", "norm"},
         "gemma3": {"attention", "MLP", "norm"}, "gpt_oss": {"attention", "norm"},
         "qwen3_5_text": {"attention", "MLP", "norm", "gated delta net"},
         "qwen3_5_wrapper": {"attention", "MLP", "norm", "gated delta net"}}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("family", KINDS)
@torch.no_grad()
def test_compiled_parts_give_the_features_of_the_plain_forward(family, dynamic, capsys):
    decoder = decoder_of(family)
    ids = torch.randint(5, VOCAB, (2, 24))
    plain = TappedForward(decoder, (0, 2))
    wanted = plain(ids)
    plain.taps.remove()
    parts = CompiledParts(decoder, f"{family}{dynamic}", backend="eager", dynamic=dynamic,
                          kernel=transformers_delta_rule)
    assert set(parts.parts) == KINDS[family]
    found = TappedForward(decoder, (0, 2), parts=parts)(ids)
    assert set(parts.parts) == KINDS[family] and parts.checked == {ids.shape}, capsys.readouterr()
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and "compiled parts" in said
    assert ("GptOssExperts" in said) == (family == "gpt_oss")


@torch.no_grad()
def test_removed_parts_are_the_plain_forward():
    decoder = decoder_of("qwen3_5_text")
    ids = torch.randint(5, VOCAB, (2, 24))
    parts = CompiledParts(decoder, "removed", backend="eager", kernel=transformers_delta_rule)
    parts.remove()
    wanted = decoder(input_ids=ids, use_cache=False).last_hidden_state
    assert not any("forward" in vars(module) for module in decoder.modules())
    torch.manual_seed(0)
    assert torch.equal(decoder_of("qwen3_5_text")(input_ids=ids, use_cache=False).last_hidden_state, wanted)


@torch.no_grad()
def test_a_kind_that_differs_or_fails_runs_as_before_and_says_so(capsys, monkeypatch):
    decoder = decoder_of("qwen3_5_text")
    ids = torch.randint(5, VOCAB, (2, 24))
    wanted = TappedForward(decoder, (0, 2))(ids)

    def no_decay(query, key, value, g, **options):
        return transformers_delta_rule(query, key, value, g=g * 0, **options)
    parts = CompiledParts(decoder, "differs", backend="eager", kernel=no_decay)

    def broken(*_, **__):
        raise RuntimeError("the compiler gave up\nat length")
    parts.parts["MLP"] = [(module, plain, broken) for module, plain, _ in parts.parts["MLP"]]
    parts.install()
    forward = TappedForward(decoder, (0, 2), parts=parts)
    torch.testing.assert_close(forward(ids), wanted, rtol=1e-4, atol=1e-5)
    said = capsys.readouterr().out
    assert set(parts.parts) == {"attention", "norm"}
    assert "kind MLP are not compiled" in said and "the compiler gave up" in said
    assert "kind gated delta net are not compiled" in said and "differs from the uncompiled" in said
    assert said.count("\n") == 3


@torch.no_grad()
def test_a_later_shape_is_checked_too():
    decoder = decoder_of("llama")
    parts = CompiledParts(decoder, "shapes", backend="eager")
    forward = TappedForward(decoder, (0, 2), parts=parts)
    for shape in ((2, 24), (1, 8), (2, 24)):
        forward(torch.randint(5, VOCAB, shape))
    assert parts.checked == {(2, 24), (1, 8)}


@torch.no_grad()
def test_a_delta_net_with_other_work_is_its_own_forward():
    decoder = decoder_of("qwen3_5_text")
    net = decoder.layers[0].linear_attn
    hidden = torch.randn(1, 12, SHAPE["hidden_size"])
    mask = torch.ones(1, 12)
    mask[0, :3] = 0
    wanted = net(hidden, attention_mask=mask)

    def never(*_, **__):
        raise AssertionError("the kernel ran")
    CompiledParts(decoder, "mask", backend="eager", kernel=never)
    assert isinstance(net.forward, GatedDeltaNet)
    assert torch.equal(net(hidden, attention_mask=mask), wanted)


@torch.no_grad()
def test_the_parts_of_an_fp8_target(capsys):
    torch.manual_seed(0)
    shape = {**SHAPE, "hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shape)).eval().requires_grad_(False)
    decoder = model.get_decoder()
    form = fp8.find_form(torch.device("cpu"), "X = fp8")
    assert fp8.quantize_layers(decoder.layers, form, "X = fp8") == 4 * 5  # not k, v: 64 wide
    ids = torch.randint(5, VOCAB, (2, 24))
    plain = TappedForward(decoder, (0, 2))
    wanted = plain(ids)
    plain.taps.remove()
    parts = CompiledParts(decoder, "fp8", backend="eager")
    torch.testing.assert_close(TappedForward(decoder, (0, 2), parts=parts)(ids), wanted, rtol=1e-4, atol=1e-5)
    assert set(parts.parts) == {"attention", "MLP", "norm"}, capsys.readouterr()
