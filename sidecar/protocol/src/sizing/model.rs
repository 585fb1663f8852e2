//! From a Hugging Face config to the layers of its language model, as vLLM builds them.

use super::fields::{Fields, bad};
use super::state::State;
use super::{KvDtype, SizeError};
use serde_json::{Map, Value};

/// Windows in some layers of a Qwen model, which vLLM does not run.
const MIXED_WINDOWS: SizeError = SizeError::Unsupported(
    "the config gives some layers a window without naming them in layer_types",
);
/// Length of a chunk of Llama 4's attention, if the config does not say it.
const LLAMA4_CHUNK_TOKENS: u32 = 8192;
/// Most layers of a model.
const LAYERS_MAX: u64 = 4096;
/// Fields of a multimodal config that hold the config of its language model.
const NESTED: [&str; 4] = [
    "text_config",
    "llm_config",
    "language_config",
    "thinker_config",
];

/// What one layer keeps of a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layer {
    /// A key and a value per token and KV head.
    Heads {
        heads: Heads,
        span: Span,
    },
    /// MLA: one vector per token.
    Latent {
        numbers: u64,
    },
    State(State),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heads {
    pub count: u64,
    /// Numbers of a key, and of a value.
    pub numbers: u64,
}

/// How far attention looks back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Span {
    Full,
    /// The last tokens.
    Window(u32),
    /// The current chunk of the prompt, as in Llama 4.
    Chunk(u32),
}

/// How the layers of a family follow from its config.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Family {
    /// Layers with KV heads. `layer_types` or `sliding_window` may name windows.
    Heads,
    /// Windows, but for every n-th layer, unless `layer_types` names them. The window has `more` tokens than the config says.
    Windows {
        period: u64,
        more: u32,
    },
    Mla,
    /// Attention and Gated delta nets.
    DeltaNet,
    Jamba,
    Granite,
    /// Attention and Mamba 2 in each layer.
    Falcon,
    Nemotron,
    Llama4,
    /// MLA or full attention with an indexer.
    Indexer,
}

/// Whether a config without `head_dim` has heads of `hidden_size / num_attention_heads`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum HeadDim {
    Derived,
    Required,
}

/// Families by `model_type`.
const FAMILIES: &[(&[&str], Family, HeadDim)] = {
    use Family as F;
    use HeadDim::{Derived, Required};
    &[
        (
            &[
                "ernie4_5_moe",
                "granite",
                "granitemoe",
                "llama",
                "mistral",
                "mixtral",
                "olmoe",
                "phi3",
                "qwen2",
                "qwen2_5_vl",
                "qwen2_5_vl_text",
                "qwen2_moe",
                "qwen2_vl",
                "qwen2_vl_text",
            ],
            F::Heads,
            Derived,
        ),
        (
            &[
                "ernie4_5",
                "gemma",
                "glm4",
                "glm4_moe",
                "ministral3",
                "qwen3",
                "qwen3_moe",
                "qwen3_vl_moe_text",
                "qwen3_vl_text",
            ],
            F::Heads,
            Required,
        ),
        (
            &["gemma2", "gpt_oss"],
            F::Windows { period: 2, more: 0 },
            Required,
        ),
        (
            &["gemma3_text"],
            F::Windows { period: 6, more: 0 },
            Required,
        ),
        (&["exaone4"], F::Windows { period: 4, more: 0 }, Derived),
        (&["cohere2"], F::Windows { period: 4, more: 1 }, Derived),
        (
            &["deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2"],
            F::Mla,
            Derived,
        ),
        (
            &["qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"],
            F::DeltaNet,
            Required,
        ),
        (&["jamba"], F::Jamba, Derived),
        (&["granitemoehybrid"], F::Granite, Derived),
        (&["falcon_h1"], F::Falcon, Derived),
        (&["nemotron_h"], F::Nemotron, Required),
        (&["llama4_text"], F::Llama4, Required),
        (
            &["deepseek_v32", "deepseek_v4", "glm_moe_dsa"],
            F::Indexer,
            Derived,
        ),
    ]
};

/// The layers of a model's language model, and the types of its numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Model {
    /// `model_type` of the language model.
    pub name: String,
    /// vLLM's type of the model. `None` if the config names none.
    dtype: Result<Option<KvDtype>, SizeError>,
    /// Type of KV that the checkpoint's quantization names.
    kv_dtype: Result<Option<KvDtype>, SizeError>,
    pub layers: Vec<Layer>,
}

impl Model {
    /// Reads the text of a `config.json`.
    pub fn parse(text: &str) -> Result<Self, SizeError> {
        let not = SizeError::NotAConfig;
        let value: Value =
            serde_json::from_str(text).map_err(|e| not(format!("the file is not JSON: {e}")))?;
        let top = value
            .as_object()
            .ok_or_else(|| not("the file is not a JSON object".to_owned()))?;
        if top.get("is_encoder_decoder") == Some(&Value::Bool(true)) {
            return Err(SizeError::Unsupported(
                "EncoderDecoder: the model has an encoder and a decoder",
            ));
        }
        let nested = language(top);
        let fields = Fields::new(nested)?;
        Ok(Self {
            name: fields.model().to_owned(),
            dtype: named(&[top, nested]),
            kv_dtype: quantized(top).and_then(|dtype| Ok(dtype.or(quantized(nested)?))),
            layers: layers(&fields)?,
        })
    }

    /// The types of KV and of state for vLLM's `--kv-cache-dtype`.
    pub fn dtypes(&self, asked: KvDtype) -> Result<(KvDtype, KvDtype), SizeError> {
        let named = self.dtype.clone();
        if asked != KvDtype::Auto {
            return Ok((asked, named.ok().flatten().unwrap_or(KvDtype::Bfloat16)));
        }
        let model = named?.ok_or_else(|| SizeError::MissingField {
            model: self.name.clone(),
            field: "dtype",
        })?;
        Ok((self.kv_dtype.clone()?.unwrap_or(model), model))
    }
}

/// The type of a model's numbers, from the first of its configs that names one.
fn named(configs: &[&Map<String, Value>]) -> Result<Option<KvDtype>, SizeError> {
    let fields = |config: &&Map<String, Value>| {
        let field = |name: &str| Some(config.get(name)?.as_str()?.to_owned());
        field("dtype").or_else(|| field("torch_dtype"))
    };
    let Some(name) = configs.iter().find_map(fields) else {
        return Ok(None);
    };
    // vLLM converts a model in float32 unless --dtype says otherwise.
    Ok(Some(match dtype("dtype", &name)? {
        KvDtype::Float32 => KvDtype::Bfloat16,
        dtype => dtype,
    }))
}

/// The config of the language model, which multimodal models nest.
fn language(config: &Map<String, Value>) -> &Map<String, Value> {
    let nested = NESTED
        .iter()
        .find_map(|field| config.get(*field)?.as_object());
    nested.map_or(config, language)
}

/// A type by its name in PyTorch.
pub fn dtype(field: &str, name: &str) -> Result<KvDtype, SizeError> {
    match name.strip_prefix("torch.").unwrap_or(name) {
        "float32" => Ok(KvDtype::Float32),
        "float16" => Ok(KvDtype::Float16),
        "bfloat16" => Ok(KvDtype::Bfloat16),
        _ => Err(bad(field, &name.into(), "float32, float16 or bfloat16")),
    }
}

/// The type of KV that a quantized checkpoint names, in the methods for which vLLM reads one.
fn quantized(config: &Map<String, Value>) -> Result<Option<KvDtype>, SizeError> {
    let Some(outer) = config
        .get("quantization_config")
        .or_else(|| config.get("compression_config"))
    else {
        return Ok(None);
    };
    let inner = outer.get("quantization").unwrap_or(outer);
    let given = |field: &str| {
        let value = inner.get(field).or_else(|| outer.get(field))?;
        (!value.is_null()).then_some(value)
    };
    let method = given("quant_method").and_then(Value::as_str);
    let method = method.unwrap_or("modelopt");
    let scheme = given("kv_cache_scheme");
    if method == "compressed-tensors" {
        return Ok(scheme.map(|_| KvDtype::Fp8));
    }
    if !method.starts_with("modelopt") {
        return Ok(None);
    }
    const ALGORITHM: &str = "kv_cache_quant_algo";
    match (given(ALGORITHM), scheme) {
        (Some(name), _) if name.as_str().is_some_and(|n| n.eq_ignore_ascii_case("fp8")) => {
            Ok(Some(KvDtype::Fp8))
        }
        (Some(name), _) => Err(bad(ALGORITHM, name, "FP8; set --dtype to what vLLM uses")),
        (None, Some(scheme)) => {
            let is = |field: &str, value: Value| scheme.get(field) == Some(&value);
            let fp8 = is("num_bits", 8.into()) && is("type", "float".into());
            Ok((fp8 && is("dynamic", false.into())).then_some(KvDtype::Fp8))
        }
        (None, None) => Ok(None),
    }
}

fn layers(fields: &Fields) -> Result<Vec<Layer>, SizeError> {
    let row = FAMILIES
        .iter()
        .find(|(names, ..)| names.contains(&fields.model()));
    let Some((_, family, head_dim)) = row else {
        return Err(SizeError::UnknownArchitecture(fields.model().to_owned()));
    };
    if *family == Family::Indexer {
        return Err(SizeError::Unsupported(
            "the attention of this model has an indexer with keys of its own",
        ));
    }
    let pattern = match family {
        Family::Nemotron => nemotron_kinds(fields)?,
        _ => Vec::new(),
    };
    let count = match pattern.len() as u64 {
        0 => fields.number("num_hidden_layers")?,
        count => count,
    };
    if count > LAYERS_MAX {
        return Err(bad(
            "num_hidden_layers",
            &count.into(),
            "at most 4096 layers",
        ));
    }
    if *family == Family::Mla {
        let numbers = fields.number("kv_lora_rank")? + fields.number("qk_rope_head_dim")?;
        return Ok(vec![Layer::Latent { numbers }; count as usize]);
    }
    let heads = heads(fields, *head_dim)?;
    let attention = |span| Layer::Heads { heads, span };
    let full = attention(Span::Full);
    let window = fields.window()?;
    let types = fields
        .texts("layer_types")?
        .or(fields.texts("layers_block_type")?);
    if let Some(types) = types
        .as_ref()
        .filter(|types| types.len() as u64 != count && pattern.is_empty())
    {
        return Err(bad(
            "layer_types",
            &types.len().into(),
            "as many entries as num_hidden_layers",
        ));
    }
    let chunked = || -> Result<Layer, SizeError> {
        let tokens = fields.optional("attention_chunk_size")?;
        let tokens = tokens.map_or(LLAMA4_CHUNK_TOKENS, |tokens| tokens as u32);
        Ok(attention(Span::Chunk(tokens)))
    };
    let sliding = || -> Result<Layer, SizeError> {
        let more = match family {
            Family::Windows { more, .. } => *more,
            _ => 0,
        };
        let tokens = window.ok_or_else(|| fields.missing("sliding_window"))?;
        Ok(attention(Span::Window(tokens.saturating_add(more))))
    };
    let recurrent = || match family {
        Family::DeltaNet => State::delta_net(fields).map(Layer::State),
        Family::Jamba => State::mamba(fields).map(Layer::State),
        Family::Granite | Family::Falcon => State::mamba2(fields).map(Layer::State),
        Family::Nemotron => State::nemotron(fields).map(Layer::State),
        _ => Err(SizeError::Unsupported(
            "a layer has neither attention nor a state that is known",
        )),
    };
    let named = |name: &str| match name {
        "full_attention" | "attention" => Ok(Some(full)),
        "sliding_attention" => sliding().map(Some),
        "chunked_attention" => chunked().map(Some),
        "linear_attention" | "mamba" => recurrent().map(Some),
        "mlp" | "moe" => Ok(None),
        other => Err(bad(
            "layer_types",
            &other.into(),
            "a kind of attention or state that is known",
        )),
    };
    let every = |kind: &dyn Fn(u64) -> Result<Layer, SizeError>| (0..count).map(kind).collect();
    let full_every = |period: u64, other: &dyn Fn() -> Result<Layer, SizeError>| {
        every(&|at| match (at + 1).is_multiple_of(period) {
            true => Ok(full),
            false => other(),
        })
    };
    match (family, types) {
        (Family::Nemotron, _) => pattern
            .iter()
            .filter_map(|name| named(name).transpose())
            .collect(),
        (Family::Falcon, _) => {
            let state = recurrent()?;
            Ok((0..count).flat_map(|_| [full, state]).collect())
        }
        (_, Some(types)) => types
            .iter()
            .filter_map(|name| named(name).transpose())
            .collect(),
        (Family::Windows { period, .. }, None) => {
            let period = match fields.optional("sliding_window_pattern")? {
                Some(period) => period,
                None => fields
                    .optional("_sliding_window_pattern")?
                    .unwrap_or(*period),
            };
            full_every(period, &sliding)
        }
        (Family::DeltaNet, None) => {
            full_every(fields.number("full_attention_interval")?, &recurrent)
        }
        (Family::Jamba, None) => {
            let period = fields.number("attn_layer_period")?;
            let offset = fields.get("attn_layer_offset").and_then(Value::as_u64);
            let offset = offset.ok_or_else(|| fields.missing("attn_layer_offset"))?;
            every(&|at| match at % period == offset {
                true => Ok(full),
                false => recurrent(),
            })
        }
        (Family::Granite, None) => Err(fields.missing("layer_types")),
        (Family::Llama4, None) => {
            let period = fields.optional("no_rope_layer_interval")?.unwrap_or(4);
            full_every(period, &chunked)
        }
        // Qwen has a window only if it is switched on. Absent is off.
        (_, None) if fields.model().starts_with("qwen") => {
            let on = fields.get("use_sliding_window") == Some(&Value::Bool(true));
            match fields.model() {
                _ if !on || window.is_none() => Ok(vec![full; count as usize]),
                "qwen3_moe" => every(&|_| sliding()),
                "qwen2_moe" => Err(MIXED_WINDOWS),
                _ if fields.number("max_window_layers")? == count => Ok(vec![full; count as usize]),
                _ => Err(MIXED_WINDOWS),
            }
        }
        (_, None) if window.is_some() => every(&|_| sliding()),
        // The class of this config has a window by default.
        (_, None) if fields.model() == "mistral" && !fields.names("sliding_window") => {
            Err(fields.missing("sliding_window"))
        }
        (_, None) => Ok(vec![full; count as usize]),
    }
}

fn heads(fields: &Fields, head_dim: HeadDim) -> Result<Heads, SizeError> {
    let count = fields.number("num_key_value_heads")?;
    let numbers = match (fields.optional("head_dim")?, head_dim) {
        (Some(numbers), _) => numbers,
        (None, HeadDim::Required) => return Err(fields.missing("head_dim")),
        (None, HeadDim::Derived) => {
            (fields.number("hidden_size")? / fields.number("num_attention_heads")?).max(1)
        }
    };
    Ok(Heads { count, numbers })
}

/// The kinds of layers of Nemotron-H, by its pattern of letters or by their names.
fn nemotron_kinds<'a>(fields: &Fields<'a>) -> Result<Vec<&'a str>, SizeError> {
    if let Some(names) = fields.texts("layers_block_type")? {
        return Ok(names);
    }
    const FIELD: &str = "hybrid_override_pattern";
    let pattern = fields.text(FIELD)?.ok_or_else(|| fields.missing(FIELD))?;
    let kinds = pattern.chars().map(|letter| match letter {
        'M' => Ok("mamba"),
        '*' => Ok("attention"),
        '-' | 'E' => Ok("mlp"),
        _ => Err(bad(FIELD, &pattern.into(), "letters M, *, - and E")),
    });
    kinds.collect()
}
