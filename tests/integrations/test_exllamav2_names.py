"""Every public name of exllamav2 0.3.2's classes is there, or its error says why not."""

import asyncio
import copy
import pickle
from pathlib import Path

import pytest
import torch

import exl2nb as ex
from exl2nb.core.errors import OptionError
from exl2nb.integrations import exllamav2 as ours
from exl2nb.integrations.exllamav2.absent import NotOffered
from exl2nb.model.lora import save_lora

pytestmark = pytest.mark.cpu
DEMO = str(Path(ex.__file__).parent / "demo_model")
NAMES = {  # attributes and methods that exllamav2's classes have
    "tokenizer": "config tokenizer_model tokenizer unk_token bos_token eos_token pad_token newline_token space_token unk_token_id"
    " bos_token_id eos_token_id pad_token_id newline_token_id space_token_id id_to_ord id_to_piece id_to_piece_with_special piece_to_id"
    " prefix_to_ids prefix_id_to_ids char_trie char_trie_ci unspecial_piece_to_id unspecial_id_to_piece extended_piece_to_id"
    " extended_id_to_piece special_delimiters unspecial_delimiters tokenized_str_cache max_cached_strings actual_vocab_size"
    " tokenizer_config_dict get_vocab_size single_token single_id encode encode_special encode_unspecial encode_special_or_unspecial"
    " decode decode_ decode_unspecial padding_mask num_tokens get_id_to_ord_list get_id_to_piece_list get_piece_to_id_dict"
    " get_prefix_to_ids_dict get_prefix_id_to_ids_dict get_char_trie get_char_trie_ci cached_encode_str Trie",
    "tokenizer_model": "unk_id pad_id bos_id eos_id unk_token pad_token bos_token eos_token space_char newline_char enumerate_tokens"
    " vocab_size id_to_piece piece_to_id decode encode clean_special_chars piece_to_ord id_to_ord",
    "config": "model_dir max_seq_len max_batch_size max_input_len max_attention_size max_output_len scale_pos_emb scale_alpha_value"
    " no_flash_attn no_xformers no_sdpa load_in_q4 no_graphs max_dq_size architecture model_config tensor_file_map tensor_files"
    " tokenizer_path bos_token_id eos_token_id pad_token_id hidden_size initializer_range intermediate_size num_attention_heads"
    " num_key_value_heads num_key_value_groups num_hidden_layers norm_eps vocab_size rotary_embedding_base scale_long_factor"
    " scale_short_factor alt_rope_method original_max_seq_len head_dim num_experts num_experts_per_token logit_scale scale_depth"
    " scale_emb use_qk_norm query_pre_attn_scalar final_logit_softcapping attn_logit_softcapping sliding_window sliding_window_pattern"
    " norm_head l3_rope_factor l3_rope_low_freq_factor l3_rope_high_freq_factor l3_rope_original_max_position_embeddings"
    " yarn_rope_factor yarn_rope_original_max_position_embeddings mrope_section attention_multiplier partial_rotary_factor fasttensors"
    " generation_config set_low_mem prepare arch_compat_overrides",
    "model": "config loaded load load_gen load_autosplit load_autosplit_gen load_tp unload is_quant update_loras forward",
    "cache": "model batch_size max_seq_len current_seq_len num_key_value_heads num_hidden_layers head_dim dtype fixed_device has_scales"
    " footprint reset",
    "generator": "model cache tokenizer max_seq_len max_batch_size max_chunk_size draft_model draft_cache num_draft_tokens"
    " use_ngram_draft max_ngram paged page_size max_pages max_total_tokens padded_vocab_size pending_jobs active_jobs current_loras"
    " max_sampling_threads min_sampling_threads warmup set_loras generate num_remaining_jobs clear_queue enqueue cancel iterate"
    " reset_page_table defrag_cache",
    "job": "identifier max_new_tokens min_new_tokens gen_settings stop_tokens stop_tokens_list stop_strings stop_strings_list filters"
    " return_top_tokens return_logits return_probs banned_strings decode_special_tokens filter_prefer_eos max_skips serial_number"
    " generator full_completion new_tokens is_finished is_prefill_done cached_pages cached_tokens accepted_draft_tokens"
    " rejected_draft_tokens embeddings",
    "streaming": "model cache tokenizer sequence_ids abort_event full warmup draft_model draft_cache num_speculative_tokens stop_tokens"
    " stop_strings active_loras speculative_ngram speculative_ngram_min speculative_ngram_max speculative_ngram_max_inf"
    " speculative_ngram_threshold speculative_prob_threshold settings filters banned_strings return_probabilities return_top_tokens"
    " return_logits set_stop_conditions begin_stream begin_stream_ex stream stream_ex generate_simple ngram_preload reset_sd_stats",
    "filter": "model tokenizer sequence_str background_result allow_return_type_list clone begin feed next use_background_worker"
    " can_mask_logits background_next background_drop get_next",
    "lora": "model config lora_config_path lora_path lora_scaling lora_r lora_alpha target_modules from_directory unload",
}
ABSENT = {
    "config": "arch checkpoint_fused_mlp pos_id_index rotary_embedding_base_alt vision_head_dim vision_size",
    "model": "modules modules_dict get_modules archparams cache_map set_device_map get_cache_devices device_context forward_chunk"
    " load_tp_gen tp_context last_kv_layer_idx",
    "cache": "key_states value_states key_scales create_state_tensors get_kv_state store_kv_state copy_states all_tensors touch_device"
    " roll_left clone",
    "generator": "all_pages referenced_pages job_serial iterate_gen get_paged_params validate_cache print_page_list logits_pinned",
    "job": "sequences allocate_pages prefill receive_logits held_text time_enqueue time_first_token",
    "streaming": "held_text no_logits future_tokens total_tokens strings_to_utf32 heal_next_token",
    "filter": "mask_logits prepare_logit_mask",
    "lora": "tensors embed_tokens lm_head bias_ignored",
    "settings": "ngram_trie ngram_history",
}


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    assert ours.install()
    from exllamav2 import ExLlamaV2, ExLlamaV2Cache_Q8, ExLlamaV2Config, ExLlamaV2Lora, ExLlamaV2Tokenizer
    from exllamav2.generator import (
        ExLlamaV2DynamicGenerator,
        ExLlamaV2DynamicJob,
        ExLlamaV2Filter,
        ExLlamaV2Sampler,
        ExLlamaV2StreamingGenerator,
    )

    config = ExLlamaV2Config(DEMO)
    model = ExLlamaV2(config)
    cache = ExLlamaV2Cache_Q8(model, max_seq_len=1024, lazy=True)
    model.load_autosplit(cache)
    tokenizer = ExLlamaV2Tokenizer(config)
    parts = model, cache, tokenizer
    hidden, folder = config.hidden_size, tmp_path_factory.mktemp("lora")
    save_lora(folder, {"model.layers.0.self_attn.o_proj": (torch.zeros(4, hidden), torch.zeros(hidden, 4))}, alpha=8)
    yield {
        "config": config,
        "model": model,
        "cache": cache,
        "tokenizer": tokenizer,
        "tokenizer_model": tokenizer.tokenizer_model,
        "generator": ExLlamaV2DynamicGenerator(*parts),
        "streaming": ExLlamaV2StreamingGenerator(*parts),
        "job": ExLlamaV2DynamicJob(tokenizer.encode("It was"), 4, stop_conditions=[2, "."]),
        "filter": ExLlamaV2Filter(model, tokenizer),
        "lora": ExLlamaV2Lora.from_directory(model, str(folder), 0.5),
        "settings": ExLlamaV2Sampler.Settings(),
    }
    model.unload()
    ours.uninstall()


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in NAMES.items() for name in names.split()])
def test_names_that_are_there(objects, kind, name):
    getattr(objects[kind], name)


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in ABSENT.items() for name in names.split()])
def test_names_that_are_refused_say_why(objects, kind, name):
    with pytest.raises(NotOffered, match=rf"{name} is not offered here: .{{20}}"):
        getattr(objects[kind], name)
    assert not hasattr(objects[kind], name)


def test_other_names_are_plain_attribute_errors(objects):
    for one in objects.values():
        with pytest.raises(AttributeError, match="no_such_name") as caught:
            _ = one.no_such_name
        assert not isinstance(caught.value, NotOffered)
    copy.copy(objects["settings"]), copy.deepcopy(objects["config"]), pickle.loads(pickle.dumps(objects["settings"]))


def test_names_of_modules(objects):
    with pytest.raises(ImportError, match="SeqTensor is not offered here"):
        from exllamav2 import SeqTensor  # noqa: F401
    with pytest.raises(ImportError, match="model_init is not offered here"):
        from exllamav2 import model_init  # noqa: F401
    with pytest.raises(ImportError, match="no_such_name"):
        from exllamav2 import no_such_name  # noqa: F401
    from exllamav2.generator import ExLlamaV2PostSamplingResult
    from exllamav2.generator.dynamic_embeddings import ExLlamaV2MMEmbedding  # noqa: F401
    from exllamav2.generator.hooks import ExLlamaV2PostSamplingHook  # noqa: F401
    from exllamav2.generator.sampler import ExLlamaV2Sampler
    from exllamav2.version import __version__

    assert __version__ == "0.3.2" and ExLlamaV2PostSamplingResult().feed_filters
    with pytest.raises(NotOffered, match="ExLlamaV2Sampler.sample"):
        ExLlamaV2Sampler.sample(None)


def test_the_tokenizer(objects):
    tokenizer = objects["tokenizer"]
    assert tokenizer.newline_token == "\n" and tokenizer.space_token == " "
    assert tokenizer.decode(torch.tensor([tokenizer.newline_token_id])) == "\n"
    assert tokenizer.encode(" ")[0, -1] == tokenizer.space_token_id
    pieces, ids = tokenizer.get_id_to_piece_list(), tokenizer.get_piece_to_id_dict()
    assert all(pieces[i] == piece for piece, i in ids.items()) and tokenizer.piece_to_id is ids
    prefixes = tokenizer.get_prefix_to_ids_dict()
    assert all(prefixes[piece] == sorted(i for other, i in ids.items() if other.startswith(piece)) for piece in ("th", " w", "a"))
    by_id = tokenizer.get_prefix_id_to_ids_dict()
    assert by_id[ids["th"]] == prefixes["th"] and by_id[tokenizer.eos_token_id] == [tokenizer.eos_token_id]
    node = tokenizer.get_char_trie()
    for character in "the":
        node = node.children[character]
    assert ids["the"] in node.leaf
    assert "T" not in tokenizer.get_char_trie_ci().children and "T" in tokenizer.get_char_trie().children
    ords = tokenizer.get_id_to_ord_list()
    assert len(ords) == len(pieces) and ords[ids["a"]] == ord("a") and ords[ids["th"]] == -1
    assert tokenizer.encode_special("<s>x")[0] == tokenizer.bos_token_id and 1 not in tokenizer.encode_unspecial("<s>x")
    assert tokenizer.encode_special_or_unspecial("<s>x", True) == tokenizer.encode_special("<s>x")
    assert tokenizer.decode_([1, *tokenizer.encode_unspecial("It was")], True) == "<s>It was"
    assert tokenizer.decode_unspecial(tokenizer.encode_unspecial("It was")) == "It was"
    batch = tokenizer.encode(["It was late", "She"])
    assert torch.equal(tokenizer.padding_mask(batch) == -torch.inf, batch == tokenizer.pad_token_id)
    assert tokenizer.cached_encode_str("It was") is tokenizer.cached_encode_str("It was")
    assert tokenizer.extended_piece_to_id["</s>"] == 2 and isinstance(tokenizer.tokenizer_config_dict, dict)
    assert (
        tokenizer.tokenizer_model.piece_to_ord("<0x0A>") == 10 and dict(tokenizer.tokenizer_model.enumerate_tokens())[ids["the"]] == "the"
    )


def test_the_config(objects, tmp_path):
    config = objects["config"]
    assert config.num_key_value_groups * config.num_key_value_heads == config.num_attention_heads
    assert config.intermediate_size > config.hidden_size and config.norm_eps > 0 and config.num_experts is None
    assert set(config.tensor_file_map.values()) == set(config.tensor_files) and len(config.tensor_files) == 2
    assert config.generation_config["eos_token_id"] == [2]
    with pytest.raises(OptionError, match="hidden_size is set to 7, but it only describes the model"):
        config.hidden_size = 7
    config.hidden_size = config.hidden_size


def test_model_and_cache(objects):
    model, cache = objects["model"], objects["cache"]
    assert not model.is_quant() and cache.wbits == 8 and cache.head_dim == model.config.head_dim
    cache.current_seq_len = 0
    with pytest.raises(NotOffered, match="only 0 is taken"):
        cache.current_seq_len = 5
    told = []

    def callback(done, total):
        told.append(done)
        yield done, total

    assert [*model.load_gen(callback_gen=callback)] == [(1, 1)]
    assert [*model.load_autosplit_gen(cache, callback_gen=callback)] == [(0, 1), (1, 1)]
    with pytest.raises(OptionError, match="archparams"):
        type(model)(model.config, archparams=1)


def test_jobs_and_generators(objects):
    from exllamav2.generator import ExLlamaV2DynamicJob, ExLlamaV2Sampler

    generator, tokenizer, streaming = objects["generator"], objects["tokenizer"], objects["streaming"]
    greedy = ExLlamaV2Sampler.Settings.greedy()
    job = ExLlamaV2DynamicJob(tokenizer.encode("It was"), 4, gen_settings=greedy, stop_conditions=[2, "."])
    assert job.stop_tokens == {2} and job.stop_strings == {"."} and not job.is_finished and job.generator is None
    generator.enqueue(job)
    assert generator.pending_jobs == [job] and not generator.active_jobs and job.generator is generator
    while generator.num_remaining_jobs():
        generator.iterate()
    assert job.is_finished and job.is_prefill_done() and job.full_completion and 1 <= job.new_tokens <= 4
    cancelled = ExLlamaV2DynamicJob(tokenizer.encode("It was"), 400)
    generator.enqueue(cancelled)
    generator.cancel(cancelled)
    assert cancelled.is_finished
    assert generator.max_pages * generator.page_size == generator.max_total_tokens == 1024
    streaming.set_stop_conditions([2, "x"])
    assert streaming.stop_tokens == {2} and streaming.stop_strings == {"x"}
    streaming.speculative_ngram = True
    streaming.speculative_ngram_min = 2
    assert streaming.speculative_ngram
    streaming.begin_stream_ex(tokenizer.encode("It was it was it was"), greedy)
    assert streaming.settings is greedy and streaming.stream_ex()["chunk_token_ids"].shape[0] == 1 and not streaming.full()
    streaming.speculative_ngram = False
    with pytest.raises(NotOffered, match="held_text cannot be set"):
        streaming.held_text = ""


def test_jobs_of_event_loops(objects):
    from exllamav2.generator import ExLlamaV2DynamicGeneratorAsync, ExLlamaV2DynamicJobAsync

    async def work():
        generator = ExLlamaV2DynamicGeneratorAsync(*(objects[name] for name in ("model", "cache", "tokenizer")))
        job = ExLlamaV2DynamicJobAsync(generator, objects["tokenizer"].encode("It was"), 4)
        generator.enqueue(job)
        assert generator.jobs == {job.job: job} and job.generator is generator and not job.cancelled
        async for _ in job:
            pass
        assert not generator.jobs
        other = ExLlamaV2DynamicJobAsync(generator, objects["tokenizer"].encode("It was"), 400)
        await other.cancel()
        assert other.cancelled and not generator.jobs
        with pytest.raises(NotOffered, match="queue"):
            _ = other.queue
        await generator.close()

    asyncio.run(work())


def test_adapters_of_two_directories(objects, tmp_path):
    from exllamav2 import ExLlamaV2Lora

    lora = objects["lora"]
    assert (lora.lora_r, lora.lora_alpha, lora.target_modules, lora.lora_scaling) == (4, 8, ["o_proj"], 0.5)
    with pytest.raises(OptionError, match="of one directory"):
        ExLlamaV2Lora(objects["model"], lora.lora_config_path, str(tmp_path / "adapter_model.safetensors"))
