//! Sizes of real models, from the fields of their configs that matter, and what a config that lacks one reports.

use kvcachepool_protocol::config::{ByteSize, Config};
use kvcachepool_protocol::sizing::{BLOCK_TOKENS, Flags, KvDtype, Report, SizeError};
use serde_json::{Value, json};

fn flags() -> Flags {
    Flags {
        tokens: None,
        tp: 1,
        dtype: KvDtype::Auto,
        block_size: BLOCK_TOKENS,
        chunk_tokens: None,
        memory: None,
        disk: None,
    }
}

fn sized(model: &Value, flags: &Flags) -> Result<Report, SizeError> {
    flags.report(&model.to_string(), None)
}

fn refused(model: &Value, flags: &Flags) -> String {
    sized(model, flags).unwrap_err().to_string()
}

/// `base` with some fields changed; null removes one.
fn with(base: &Value, changes: Value) -> Value {
    let mut changed = base.clone();
    for (field, value) in changes.as_object().unwrap() {
        changed[field] = value.clone();
    }
    changed
}

fn llama_8b() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "hidden_size": 4096,
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    })
}

fn qwen3_8b() -> Value {
    json!({
        "model_type": "qwen3", "torch_dtype": "bfloat16", "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 36,
        "num_key_value_heads": 8, "head_dim": 128, "sliding_window": null, "use_sliding_window": false, "max_window_layers": 36,
    })
}

fn deepseek_v3() -> Value {
    json!({
        "model_type": "deepseek_v3", "torch_dtype": "bfloat16", "hidden_size": 7168, "num_attention_heads": 128, "num_hidden_layers": 61,
        "num_key_value_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "num_nextn_predict_layers": 1, "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"},
    })
}

fn gemma3_27b() -> Value {
    json!({
        "model_type": "gemma3", "torch_dtype": "bfloat16", "vision_config": {"model_type": "siglip_vision_model"},
        "text_config": {
            "model_type": "gemma3_text", "hidden_size": 5376, "num_attention_heads": 32, "num_hidden_layers": 62, "num_key_value_heads": 16,
            "head_dim": 128, "sliding_window": 1024,
        },
    })
}

fn gpt_oss_120b() -> Value {
    let types = ["sliding_attention", "full_attention"].repeat(18);
    json!({
        "model_type": "gpt_oss", "torch_dtype": "bfloat16", "hidden_size": 2880, "num_attention_heads": 64, "num_hidden_layers": 36,
        "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128, "layer_types": types, "quantization_config": {"quant_method": "mxfp4"},
    })
}

fn qwen3_next_80b() -> Value {
    json!({
        "model_type": "qwen3_next", "torch_dtype": "bfloat16", "hidden_size": 2048, "num_attention_heads": 16, "num_hidden_layers": 48,
        "num_key_value_heads": 2, "head_dim": 256, "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
    })
}

fn jamba() -> Value {
    json!({
        "model_type": "jamba", "torch_dtype": "bfloat16", "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "attn_layer_period": 8, "attn_layer_offset": 4, "mamba_d_conv": 4, "mamba_d_state": 16, "mamba_expand": 2,
    })
}

fn llama4_scout() -> Value {
    json!({
        "model_type": "llama4", "text_config": {
            "model_type": "llama4_text", "torch_dtype": "bfloat16", "num_hidden_layers": 48, "num_key_value_heads": 8, "head_dim": 128,
            "no_rope_layer_interval": 4,
        },
    })
}

fn nemotron_h_8b() -> Value {
    json!({
        "model_type": "nemotron_h", "torch_dtype": "bfloat16", "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 52,
        "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4,
    })
}

/// Kind, layers and bytes per token or of state.
fn rows(report: &Report) -> Vec<(&str, u64, u64)> {
    let groups = report.groups.iter();
    groups
        .map(|g| (g.kind, g.layers, g.token_bytes.max(g.state_bytes)))
        .collect()
}

#[test]
fn real_models_have_their_published_sizes() {
    let jamba_state = 28 * (8192 * 3 + 8192 * 16) * 2;
    let next_state = 36 * (8192 * 3 + 32 * 128 * 128) * 2;
    let nemotron_state = 24 * ((8192 + 2 * 8 * 128) * 3 * 2 + 128 * 64 * 128 * 4);
    let cases = [
        (llama_8b(), vec![("full", 32, 128 << 10)]),
        (qwen3_8b(), vec![("full", 36, 144 << 10)]),
        (deepseek_v3(), vec![("full", 61, 70_272)]),
        // The first layers have windows.
        (
            gemma3_27b(),
            vec![("window", 52, 52 * 8192), ("full", 10, 10 * 8192)],
        ),
        (
            gpt_oss_120b(),
            vec![("window", 18, 36 << 10), ("full", 18, 36 << 10)],
        ),
        (
            with(
                &llama_8b(),
                json!({"model_type": "mistral", "sliding_window": 4096}),
            ),
            vec![("window", 32, 128 << 10)],
        ),
        (
            qwen3_next_80b(),
            vec![("state", 36, next_state), ("full", 12, 24 << 10)],
        ),
        // 4 GiB for 256k tokens
        (
            jamba(),
            vec![("state", 28, jamba_state), ("full", 4, 16 << 10)],
        ),
        (
            nemotron_h_8b(),
            vec![("state", 24, nemotron_state), ("full", 4, 16 << 10)],
        ),
        (
            llama4_scout(),
            vec![("chunked", 36, 144 << 10), ("full", 12, 48 << 10)],
        ),
    ];
    for (model, expected) in cases {
        let report = sized(&model, &flags()).unwrap();
        assert_eq!(rows(&report), expected, "{model}");
        let states: u64 = report.groups.iter().map(|group| group.state_bytes).sum();
        assert_eq!(
            report.chunk_bytes,
            u64::from(report.chunk_tokens) * report.token_bytes + states,
            "{model}"
        );
        let flags = Flags {
            memory: Some(ByteSize(64 << 30)),
            ..flags()
        };
        assert!(
            sized(&model, &flags).unwrap().tiers[0].chunks > 0,
            "{model}"
        );
    }
}

#[test]
fn a_model_with_states_has_chunks_of_one_block_as_long_as_a_state() {
    let tokens = |model: &Value, tp| {
        let report = sized(model, &Flags { tp, ..flags() }).unwrap();
        (report.block_tokens, report.chunk_tokens)
    };
    assert_eq!(tokens(&qwen3_next_80b(), 1), (544, 544));
    // A rank still has one of the two KV heads, and half of the state.
    assert_eq!(tokens(&qwen3_next_80b(), 2), (544, 544));
    assert_eq!(tokens(&llama_8b(), 1), (16, 256));
    assert_eq!(tokens(&llama4_scout(), 1), (16, 256));
}

#[test]
fn a_prompt_loads_the_current_chunk_of_chunked_attention_and_one_state() {
    let prompt = |model: &Value, tokens| {
        let flags = Flags {
            tokens: Some(tokens),
            ..flags()
        };
        sized(model, &flags).unwrap().prompt.unwrap()
    };
    // 36 layers look back to token 8192, and 12 to the beginning.
    let scout = prompt(&llama4_scout(), 10_000);
    assert_eq!(
        scout.loaded_bytes,
        (10_000 - 8192) * (144 << 10) + 10_000 * (48 << 10)
    );
    assert_eq!(
        prompt(&llama4_scout(), 8192).loaded_bytes,
        8192 * (48 << 10)
    );
    // 7 blocks of 544 tokens
    let next = sized(&qwen3_next_80b(), &flags()).unwrap();
    let state: u64 = next.groups.iter().map(|group| group.state_bytes).sum();
    let loaded = prompt(&qwen3_next_80b(), 4000);
    assert_eq!(loaded.stored_tokens, 7 * 544);
    assert_eq!(loaded.loaded_bytes, 7 * 544 * (24 << 10) + state);
    assert_eq!(loaded.stored_bytes, 7 * (544 * (24 << 10) + state));
}

#[test]
fn layers_are_read_in_each_form_that_configs_have() {
    let qwen2 = |more| {
        with(
            &llama_8b(),
            with(
                &json!({"model_type": "qwen2", "sliding_window": 4096, "max_window_layers": 28}),
                more,
            ),
        )
    };
    let gemma2 = json!({
        "model_type": "gemma2", "dtype": "bfloat16", "num_hidden_layers": 26, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096,
    });
    let falcon = json!({
        "model_type": "falcon_h1", "dtype": "bfloat16", "num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": 64, "mamba_d_ssm": 1024,
        "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_n_heads": 16,
    });
    let types = ["mamba", "mamba", "attention", "mamba"];
    let granite = with(
        &falcon,
        json!({"model_type": "granitemoehybrid", "num_hidden_layers": 4, "layer_types": types}),
    );
    let cases = [
        (
            qwen2(json!({"use_sliding_window": false})),
            vec![("full", 32)],
        ),
        (
            qwen2(json!({"use_sliding_window": true, "max_window_layers": 32})),
            vec![("full", 32)],
        ),
        (qwen2(json!({})), vec![("full", 32)]),
        (
            qwen2(json!({"model_type": "qwen3_moe", "head_dim": 128, "use_sliding_window": true})),
            vec![("window", 32)],
        ),
        (qwen2(json!({"sliding_window": null})), vec![("full", 32)]),
        (qwen2(json!({"sliding_window": 0})), vec![("full", 32)]),
        (gemma2.clone(), vec![("window", 13), ("full", 13)]),
        (
            with(&gemma2, json!({"sliding_window_pattern": 13})),
            vec![("window", 24), ("full", 2)],
        ),
        (falcon, vec![("full", 3), ("state", 3)]),
        (granite, vec![("state", 3), ("full", 1)]),
        (
            with(
                &nemotron_h_8b(),
                json!({"layers_block_type": ["mamba", "moe", "attention", "mlp"]}),
            ),
            vec![("state", 1), ("full", 1)],
        ),
    ];
    for (model, expected) in cases {
        let report = sized(&model, &flags()).unwrap();
        let found: Vec<_> = rows(&report)
            .iter()
            .map(|(kind, layers, _)| (*kind, *layers))
            .collect();
        assert_eq!(found, expected, "{model}");
    }
    // Cohere's windows include the current token beside those of the config.
    let cohere = with(&gemma2, json!({"model_type": "cohere2"}));
    assert_eq!(
        sized(&cohere, &flags()).unwrap().groups[0].window_tokens,
        4097
    );
}

#[test]
fn ranks_share_kv_heads_and_state_and_replicate_mla() {
    let ranks = |model: &Value, tp: u32| {
        let report = sized(model, &Flags { tp, ..flags() }).unwrap();
        (
            report.rank_token_bytes,
            report.token_bytes,
            report.groups[0].shards,
        )
    };
    assert_eq!(ranks(&llama_8b(), 4), (32 << 10, 128 << 10, 4));
    // More ranks than KV heads: every rank stores one head.
    assert_eq!(ranks(&llama_8b(), 16), (16 << 10, 256 << 10, 16));
    assert_eq!(ranks(&deepseek_v3(), 8), (70_272, 70_272, 1));
    let state = |model: &Value, tp: u32| {
        let report = sized(model, &Flags { tp, ..flags() }).unwrap();
        let group = report
            .groups
            .into_iter()
            .find(|g| g.kind == "state")
            .unwrap();
        (group.rank_state_bytes, group.state_bytes)
    };
    let (one, two) = (state(&qwen3_next_80b(), 1), state(&qwen3_next_80b(), 2));
    assert_eq!((one.0, one.1), (2 * two.0, two.1));
    // Every rank holds a group of Mamba 2 of its own.
    let more = state(&nemotron_h_8b(), 16).1 - state(&nemotron_h_8b(), 8).1;
    assert_eq!(more, 24 * 8 * 2 * 128 * 3 * 2);
}

#[test]
fn the_type_of_kv_is_the_flags_or_the_checkpoints_or_the_models() {
    let bytes = |model: &Value, dtype: KvDtype| {
        let report = sized(model, &Flags { dtype, ..flags() }).unwrap();
        (report.kv_dtype, report.token_bytes)
    };
    let named = |name: &str| with(&llama_8b(), json!({"torch_dtype": name}));
    let quantized = |config: Value| with(&llama_8b(), json!({"quantization_config": config}));
    let scheme = quantized(
        json!({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}),
    );
    let algorithm = quantized(
        json!({"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "FP8"}}),
    );
    assert_eq!(
        bytes(&named("float16"), KvDtype::Auto),
        ("float16", 128 << 10)
    );
    // vLLM does not run such a model in float32 by itself
    assert_eq!(
        bytes(&named("float32"), KvDtype::Auto),
        ("bfloat16", 128 << 10)
    );
    assert_eq!(
        bytes(&named("float32"), KvDtype::Float32),
        ("float32", 256 << 10)
    );
    assert_eq!(bytes(&llama_8b(), KvDtype::Fp8), ("fp8", 64 << 10));
    assert_eq!(bytes(&scheme, KvDtype::Auto), ("fp8", 64 << 10));
    assert_eq!(bytes(&algorithm, KvDtype::Auto), ("fp8", 64 << 10));
    assert_eq!(
        bytes(&algorithm, KvDtype::Bfloat16),
        ("bfloat16", 128 << 10)
    );
    let of_modelopt =
        |scheme: Value| quantized(json!({"quant_method": "modelopt", "kv_cache_scheme": scheme}));
    let static_fp8 = of_modelopt(json!({"num_bits": 8, "type": "float", "dynamic": false}));
    assert_eq!(bytes(&static_fp8, KvDtype::Auto), ("fp8", 64 << 10));
    // vLLM reads no type of KV from these.
    for unread in [
        of_modelopt(json!({"num_bits": 8, "type": "int", "dynamic": false})),
        quantized(json!({"quant_method": "fp8", "kv_cache_scheme": "static"})),
    ] {
        assert_eq!(bytes(&unread, KvDtype::Auto), ("bfloat16", 128 << 10));
    }
    let four = quantized(json!({"kv_cache_quant_algo": "NVFP4"}));
    assert_eq!(bytes(&four, KvDtype::Fp8), ("fp8", 64 << 10));
    assert_eq!(
        bytes(&named("int4"), KvDtype::Float16),
        ("float16", 128 << 10)
    );
    let refused = refused(&four, &flags());
    assert!(
        refused.starts_with("BadField: kv_cache_quant_algo is \"NVFP4\""),
        "{refused}"
    );
}

#[test]
fn a_prompt_is_stored_in_whole_blocks_and_loads_the_end_of_windows() {
    let flags = Flags {
        tokens: Some(10_007),
        ..flags()
    };
    let prompt = sized(&gemma3_27b(), &flags).unwrap().prompt.unwrap();
    assert_eq!((prompt.stored_tokens, prompt.chunks), (10_000, 40));
    assert_eq!(prompt.stored_bytes, 10_000 * 62 * 8192);
    assert_eq!(prompt.loaded_bytes, 10_000 * 10 * 8192 + 1024 * 52 * 8192);
    let short = Flags {
        tokens: Some(15),
        ..flags
    };
    let prompt = sized(&gemma3_27b(), &short).unwrap().prompt.unwrap();
    assert_eq!(
        (prompt.stored_tokens, prompt.chunks, prompt.loaded_bytes),
        (0, 0, 0)
    );
}

#[test]
fn tiers_hold_whole_chunks() {
    let tier = |model: &Value, flags: &Flags| sized(model, flags).unwrap().tiers.remove(0);
    let memory = |size: u64, tp: u32| Flags {
        memory: Some(ByteSize(size)),
        tokens: Some(32_000),
        tp,
        ..flags()
    };
    let llama_70b = with(&llama_8b(), json!({"num_hidden_layers": 80}));
    let held = tier(&llama_8b(), &memory(64 << 30, 1));
    assert_eq!(
        (held.chunks, held.tokens, held.prompts),
        (2048, 524_288, Some(16))
    );
    // 3 slots of 80 MiB in a segment of 256 MiB; 8 ranks have 25 slots of 10 MiB
    assert_eq!(tier(&llama_70b, &memory(64 << 30, 1)).chunks, 768);
    assert_eq!(tier(&llama_70b, &memory(64 << 30, 8)).chunks, 800);
    // a segment of the default size has 64 MiB
    let held = tier(&llama_70b, &memory(4 << 30, 1));
    assert_eq!((held.chunks, held.prompts), (0, Some(0)));
    assert!(
        held.reason
            .starts_with("SectionTooLarge: a section of 80Mi does not fit into a segment of 64Mi")
    );
    // The index has one record per chunk.
    let small = with(&llama_8b(), json!({"num_hidden_layers": 1}));
    let mut config = Config::default();
    config.memory.size = ByteSize(1 << 40);
    let held = flags()
        .report(&small.to_string(), Some(&config))
        .unwrap()
        .tiers
        .remove(0);
    assert_eq!((held.tier, held.chunks), ("memory", 65_536));
    // 32 MiB and a head, in slots that waste 1/16 at most
    let held = tier(
        &llama_8b(),
        &Flags {
            disk: Some(ByteSize(1 << 40)),
            ..flags()
        },
    );
    assert_eq!((held.tier, held.chunks), ("disk", 30_716));
    assert_eq!(held.prompts, None);
}

#[test]
fn a_config_sets_chunks_and_tiers_that_no_flag_sets() {
    let mut config = Config::default();
    config.cache.chunk_tokens = 1000;
    config.memory.size = ByteSize(8 << 30);
    let with = |flags: Flags, config: &Config| {
        flags.report(&llama_8b().to_string(), Some(config)).unwrap()
    };
    let report = with(flags(), &config);
    assert_eq!((report.chunk_tokens, report.tiers.len()), (1008, 1));
    assert_eq!(report.tiers[0].size_bytes, 8 << 30);
    config.disk.path = Some("/var/lib/kvcachepool".into());
    config.disk.size = ByteSize(16 << 30);
    let flags = Flags {
        chunk_tokens: Some(64),
        memory: Some(ByteSize(1 << 30)),
        ..flags()
    };
    let report = with(flags, &config);
    let sizes: Vec<u64> = report.tiers.iter().map(|tier| tier.size_bytes).collect();
    assert_eq!((report.chunk_tokens, sizes), (64, vec![1 << 30, 16 << 30]));
}

#[test]
fn what_cannot_be_computed_is_an_error_that_names_the_field() {
    let missing = |model: &Value, field: &str| {
        let text = refused(model, &flags());
        let start = format!("lacks {field}. Add it, or write a config with every field: python3");
        assert!(
            text.starts_with("MissingField: ") && text.contains(&start),
            "{text}"
        );
    };
    missing(&json!({}), "model_type");
    for field in [
        "torch_dtype",
        "num_hidden_layers",
        "num_key_value_heads",
        "hidden_size",
        "num_attention_heads",
    ] {
        let named = if field == "torch_dtype" {
            "dtype"
        } else {
            field
        };
        missing(&with(&llama_8b(), json!({field: null})), named);
    }
    missing(&with(&qwen3_8b(), json!({"head_dim": null})), "head_dim");
    missing(
        &with(&deepseek_v3(), json!({"kv_lora_rank": null})),
        "kv_lora_rank",
    );
    missing(
        &with(&gpt_oss_120b(), json!({"sliding_window": null})),
        "sliding_window",
    );
    missing(
        &with(&llama_8b(), json!({"model_type": "mistral"})),
        "sliding_window",
    );
    missing(
        &with(&qwen3_next_80b(), json!({"full_attention_interval": null})),
        "full_attention_interval",
    );
    missing(
        &with(&jamba(), json!({"attn_layer_offset": null})),
        "attn_layer_offset",
    );
    missing(
        &with(&jamba(), json!({"mamba_d_state": null})),
        "mamba_d_state",
    );
    missing(
        &with(&nemotron_h_8b(), json!({"hybrid_override_pattern": null})),
        "hybrid_override_pattern",
    );
    missing(
        &with(&jamba(), json!({"model_type": "granitemoehybrid"})),
        "layer_types",
    );

    let cases = [
        (
            with(&llama_8b(), json!({"model_type": "new"})),
            "UnknownArchitecture: model_type new is not known",
        ),
        (
            with(&llama_8b(), json!({"model_type": 7})),
            "BadField: model_type is 7; expected a string",
        ),
        (
            with(&llama_8b(), json!({"num_hidden_layers": -1})),
            "BadField: num_hidden_layers is -1; expected a number from 1",
        ),
        (
            with(&llama_8b(), json!({"num_hidden_layers": 5000})),
            "BadField: num_hidden_layers is 5000; expected at most 4096 layers",
        ),
        (
            with(&llama_8b(), json!({"head_dim": 0})),
            "BadField: head_dim is 0",
        ),
        (
            with(&llama_8b(), json!({"sliding_window": "x"})),
            "BadField: sliding_window is \"x\"",
        ),
        (
            with(
                &llama_8b(),
                json!({"model_type": "qwen2", "sliding_window": 9, "use_sliding_window": true, "max_window_layers": 28}),
            ),
            "Unsupported: the config gives some layers a window",
        ),
        (
            with(&llama_8b(), json!({"layer_types": ["full_attention"]})),
            "BadField: layer_types is 1; expected as many entries",
        ),
        (
            with(&llama_8b(), json!({"layer_types": 3})),
            "BadField: layer_types is 3; expected a list of strings",
        ),
        (
            with(
                &gpt_oss_120b(),
                json!({"layer_types": vec!["convolution"; 36]}),
            ),
            "BadField: layer_types is \"convolution\"",
        ),
        (
            with(
                &llama_8b(),
                json!({"layer_types": vec!["linear_attention"; 32]}),
            ),
            "Unsupported: ",
        ),
        (
            with(&llama_8b(), json!({"torch_dtype": "int4"})),
            "BadField: dtype is \"int4\"; expected float32, float16 or bfloat16",
        ),
        (
            with(&nemotron_h_8b(), json!({"hybrid_override_pattern": "M?"})),
            "BadField: hybrid_override_pattern is \"M?\"",
        ),
        (
            with(&llama_8b(), json!({"is_encoder_decoder": true})),
            "Unsupported: EncoderDecoder",
        ),
        (
            with(&deepseek_v3(), json!({"model_type": "deepseek_v32"})),
            "Unsupported: the attention of this model has an indexer",
        ),
        (json!([1]), "NotAConfig: the file is not a JSON object"),
    ];
    for (model, expected) in cases {
        let text = refused(&model, &flags());
        assert!(text.starts_with(expected), "{text}");
    }
    let text = flags().report("{", None).unwrap_err().to_string();
    assert!(
        text.starts_with("NotAConfig: the file is not JSON: "),
        "{text}"
    );
    let text = refused(&llama_8b(), &Flags { tp: 3, ..flags() });
    assert!(
        text.starts_with(
            "BadTensorParallel: vLLM cannot split the 8 KV heads of this model over 3 ranks"
        ),
        "{text}"
    );
    let text = refused(
        &with(&qwen3_next_80b(), json!({"num_key_value_heads": 3})),
        &Flags { tp: 3, ..flags() },
    );
    assert!(
        text.starts_with("BadTensorParallel: vLLM cannot split the state"),
        "{text}"
    );
    for flags in [
        Flags { tp: 256, ..flags() },
        Flags {
            chunk_tokens: Some(65_536),
            ..flags()
        },
    ] {
        let text = refused(&llama_8b(), &flags);
        assert!(text.starts_with("BadPlan: "), "{text}");
    }
    let huge = with(
        &llama_8b(),
        json!({"num_hidden_layers": 4096, "num_key_value_heads": 1 << 20, "head_dim": 1 << 20}),
    );
    let most = Flags {
        tokens: Some(1_000_000_000),
        chunk_tokens: Some(65_536),
        block_size: 65_536,
        ..flags()
    };
    assert!(refused(&huge, &most).starts_with("BadPlan: "));
}

#[test]
fn the_text_aligns_its_columns() {
    let flags = Flags {
        tokens: Some(32_000),
        memory: Some(ByteSize(64 << 30)),
        tp: 2,
        ..flags()
    };
    let expected = "\
model      gemma3_text, KV in bfloat16, tensor parallel size 2
chunk      256 tokens in blocks of 16

GROUP      LAYERS  SHARDS  WINDOW  PER TOKEN  TOKEN, ONE RANK  PER CHUNK  STATE
window     52      2       1024    416Ki      208Ki            104Mi      -
full       10      2       -       80Ki       40Ki             20Mi       -
all                                496Ki      248Ki            124Mi

prompt     32000 tokens: 125 chunks, 15.1Gi stored, 2916Mi to load
memory     64Gi: 518 chunks, 132608 tokens, 4 prompts of 32000 tokens
";
    assert_eq!(sized(&gemma3_27b(), &flags).unwrap().to_string(), expected);
}
