from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, GgufConfig

from baton.errors import ModelError
from engine.convert import convert, hugging_face_name, main, shortest_float
from tests import tiny_gguf
from tests.engine.tiny_models import load_runner, logits_of, make_request
from tests.tiny_gguf import TOKENS, tiny_llama, write_gguf, write_quantized


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def converted(source: Path) -> Path:
    folder = source.with_suffix("")
    folder.mkdir()
    convert(source, folder, lambda done, total: None)
    return folder


# 16/4, 64/8 and 9/3 alone would hide heads // kv_heads taken for kv_heads: they are the same there.
HEADS = pytest.mark.parametrize(
    ("num_heads", "num_kv_heads"), [(8, 2), (32, 4), (32, 8), (16, 4), (64, 8), (6, 6), (9, 3)]
)


@HEADS
def test_weights_come_back_bit_exactly(tmp_path, num_heads, num_kv_heads):
    model = tiny_llama(num_heads, num_kv_heads)
    write_gguf(tmp_path / "m.gguf", model)

    weights = load_file(converted(tmp_path / "m.gguf") / "model.safetensors")

    expected = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        assert weights[name].dtype == torch.bfloat16
        assert torch.equal(weights[name].float(), tensor), name


@HEADS
def test_the_folder_computes_the_original_logits(tmp_path, num_heads, num_kv_heads):
    original = tiny_llama(num_heads, num_kv_heads)
    write_gguf(tmp_path / "m.gguf", original)
    token_ids = torch.randint(0, len(TOKENS), (1, 51), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = original(token_ids).logits[0]

    runner = load_runner(converted(tmp_path / "m.gguf"), block_size=64, num_blocks=2)
    (ours,) = logits_of(runner, [(make_request(token_ids[0].tolist(), block_ids=[1]), 51)])

    # With 512 channels of large weights fp32 rounds at 3e-4; a wrong permutation is off by more than 1.
    for position in (0, 1, 50):
        torch.testing.assert_close(ours[position], expected[position], atol=1e-3, rtol=1e-5)


def test_transformers_reads_the_folder_as_the_original(tmp_path):
    original = tiny_llama(8, 2)
    write_gguf(tmp_path / "m.gguf", original)
    token_ids = torch.randint(0, len(TOKENS), (1, 51), generator=torch.Generator().manual_seed(3))

    reloaded = AutoModelForCausalLM.from_pretrained(converted(tmp_path / "m.gguf"), dtype=torch.float32)

    with torch.no_grad():
        torch.testing.assert_close(reloaded(token_ids).logits, original(token_ids).logits)


def test_weights_are_those_transformers_reads_from_the_same_file(tmp_path):
    write_quantized(tmp_path / "m.gguf", tiny_llama(8, 2), gguf.GGMLQuantizationType.Q8_0)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="m.gguf", quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    ).state_dict()

    ours = load_file(converted(tmp_path / "m.gguf") / "model.safetensors")

    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name].bfloat16()), name


def unpack_q8_0(packed: np.ndarray) -> np.ndarray:
    """ggml's block_q8_0: an fp16 scale, then 32 signed bytes."""
    blocks = packed.reshape(-1, 34)
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    return scale * blocks[:, 2:].copy().view(np.int8)


def unpack_q4_1(packed: np.ndarray) -> np.ndarray:
    """ggml's block_q4_1: fp16 scale and minimum, then 16 bytes; low halves are elements 0..15."""
    blocks = packed.reshape(-1, 20)
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    minimum = blocks[:, 2:4].copy().view(np.float16).astype(np.float32)
    nibbles = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
    return scale * nibbles + minimum


@pytest.mark.parametrize(
    ("kind", "unpack"),
    [(gguf.GGMLQuantizationType.Q8_0, unpack_q8_0), (gguf.GGMLQuantizationType.Q4_1, unpack_q4_1)],
    ids=["Q8_0", "Q4_1"],
)
def test_quantized_blocks_are_unpacked_and_rounded_once(tmp_path, kind, unpack):
    packed = write_quantized(tmp_path / "m.gguf", tiny_llama(8, 2), kind)

    weights = load_file(converted(tmp_path / "m.gguf") / "model.safetensors")

    for name in ("model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight"):
        expected = torch.from_numpy(unpack(packed[name]).reshape(weights[name].shape))
        assert torch.equal(weights[name], expected.bfloat16()), name


def test_configuration_is_clean(tmp_path):
    write_gguf(tmp_path / "m.gguf", tiny_llama(8, 2))
    folder = converted(tmp_path / "m.gguf")

    config = json.loads((folder / "config.json").read_text())

    assert config["rms_norm_eps"] == 1e-5
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 50000.0}
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (8, 2, 8)
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)
    assert config["tie_word_embeddings"] is True
    assert config["vocab_size"] == len(TOKENS)
    assert config["max_position_embeddings"] == 256
    assert "quantization_config" not in config
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    assert (folder / "chat_template.jinja").read_text() == tiny_gguf.TEMPLATE


@pytest.mark.parametrize("value", [1e-5, 1e-6, 10000.0, 500000.0, 0.1])
def test_shortest_float_undoes_the_rounding_to_fp32(value):
    assert shortest_float(float(np.float32(value))) == value


def tokenizer(tmp_path: Path, pre: str) -> Tokenizer:
    write_gguf(tmp_path / "m.gguf", tiny_llama(8, 2), pre=pre)
    return Tokenizer.from_file(str(converted(tmp_path / "m.gguf") / "tokenizer.json"))


def test_smollm_keeps_digits_apart(tmp_path):
    one, two = TOKENS.index("1"), TOKENS.index("2")
    assert tokenizer(tmp_path, "smollm").encode("1212").ids == [one, two, one, two]


def test_gpt_2_merges_digits(tmp_path):
    assert tokenizer(tmp_path, "gpt-2").encode("1212").ids == [TOKENS.index("12")] * 2


def test_control_tokens_are_single_ids_and_skipped_in_text(tmp_path):
    smollm = tokenizer(tmp_path, "smollm")
    ids = smollm.encode("<|im_start|>hello hello<|im_end|>").ids
    assert ids == [1, TOKENS.index("hello"), TOKENS.index("Ġhello"), 2]
    assert smollm.decode(ids) == "hello hello"
    assert smollm.decode(ids, skip_special_tokens=False) == "<|im_start|>hello hello<|im_end|>"


def test_every_vocabulary_entry_keeps_its_id(tmp_path):
    smollm = tokenizer(tmp_path, "smollm")
    assert smollm.get_vocab_size() == len(TOKENS)
    assert [smollm.id_to_token(index) for index in range(len(TOKENS))] == TOKENS


@pytest.mark.parametrize("text", ["é漢字🙂", " \t\n  x", "a\u00a0b", "Ünïcode 12 don't"])
def test_any_text_survives(tmp_path, text):
    smollm = tokenizer(tmp_path, "smollm")
    ids = smollm.encode(text).ids
    assert smollm.decode(ids) == text
    # Nothing here can merge, so there is one id per UTF-8 byte.
    assert len(ids) == len(text.encode())


def bad_file(path: Path, *, architecture: str = "llama", scaling: str | None = None) -> None:
    writer = gguf.GGUFWriter(path, architecture)
    if scaling:
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling))
    writer.add_tensor("token_embd.weight", np.zeros((2, 2), np.float32))
    tiny_gguf.finish(writer)


def test_another_architecture_is_refused_by_name(tmp_path):
    bad_file(tmp_path / "m.gguf", architecture="gemma")
    with pytest.raises(ModelError, match=r"general\.architecture is 'gemma'"):
        converted(tmp_path / "m.gguf")


def test_scaled_rotary_embeddings_are_refused(tmp_path):
    bad_file(tmp_path / "m.gguf", scaling="yarn")
    with pytest.raises(ModelError, match=r"rope\.scaling\.type is 'yarn'"):
        converted(tmp_path / "m.gguf")


def test_a_missing_key_is_named(tmp_path):
    bad_file(tmp_path / "m.gguf")
    with pytest.raises(ModelError, match=r"llama\.attention\.head_count"):
        converted(tmp_path / "m.gguf")


@pytest.mark.parametrize("name", ["rope_freqs.weight", "blk.0.ffn_gate_exps.weight", "output.bias"])
def test_an_unknown_tensor_is_refused(name):
    with pytest.raises(ModelError, match=name):
        hugging_face_name(name)


def test_an_unknown_pre_tokenizer_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.pre is 'tekken'"):
        tokenizer(tmp_path, "tekken")


@pytest.mark.parametrize("keep", [0, 3, 100, 5000, -100], ids=lambda keep: f"first_{keep}_bytes")
def test_a_cut_file_is_an_error_on_standard_error(tmp_path, capsys, keep):
    write_gguf(tmp_path / "whole.gguf", tiny_llama(8, 2))
    (tmp_path / "cut.gguf").write_bytes((tmp_path / "whole.gguf").read_bytes()[:keep])

    status = main([str(tmp_path / "cut.gguf"), str(tmp_path / "out")])

    assert status == 1
    assert "cut.gguf is not a readable GGUF file" in capsys.readouterr().err


def test_progress_counts_every_tensor(tmp_path, capsys):
    write_gguf(tmp_path / "m.gguf", tiny_llama(8, 2))
    assert main([str(tmp_path / "m.gguf"), str(tmp_path / "out")]) == 0
    # Two layers of nine tensors, the embedding and the last norm.
    assert capsys.readouterr().out.splitlines()[-1] == "progress 20 20"
