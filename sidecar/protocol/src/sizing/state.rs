//! Sizes of recurrent state, as vLLM's `MambaStateShapeCalculator` computes them.

use super::fields::Fields;
use super::{KvDtype, SizeError};

/// The state of one layer: the last inputs of a convolution, and a recurrent state per head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct State {
    /// Channels of the convolution without those of `groups`. Ranks share them.
    channels: u64,
    /// Groups of Mamba 2 and the channels of each. Ranks between which groups cannot be divided hold replicas.
    groups: u64,
    group_channels: u64,
    /// Inputs that the convolution keeps per channel.
    inputs: u64,
    /// Heads of the recurrent state, and the numbers of each.
    heads: u64,
    head_numbers: u64,
    /// Type of the recurrent state. `Auto` is the model's type.
    dtype: KvDtype,
}

impl State {
    /// Mamba 1, as in Jamba.
    pub fn mamba(fields: &Fields) -> Result<Self, SizeError> {
        let channels = fields.number("mamba_expand")? * fields.number("hidden_size")?;
        Ok(Self {
            channels,
            groups: 0,
            group_channels: 0,
            inputs: fields.number("mamba_d_conv")? - 1,
            heads: channels,
            head_numbers: fields.number("mamba_d_state")?,
            dtype: KvDtype::Auto,
        })
    }

    /// Mamba 2 with the field names of Granite and Falcon.
    pub fn mamba2(fields: &Fields) -> Result<Self, SizeError> {
        let channels = match fields.optional("mamba_d_ssm")? {
            Some(channels) => channels,
            None => fields.number("mamba_expand")? * fields.number("hidden_size")?,
        };
        let numbers = fields.number("mamba_d_state")?;
        Ok(Self {
            channels,
            groups: fields.number("mamba_n_groups")?,
            group_channels: 2 * numbers,
            inputs: fields.number("mamba_d_conv")? - 1,
            heads: fields.number("mamba_n_heads")?,
            head_numbers: fields.number("mamba_d_head")? * numbers,
            dtype: KvDtype::Auto,
        })
    }

    /// Mamba 2 with the field names of Nemotron-H.
    pub fn nemotron(fields: &Fields) -> Result<Self, SizeError> {
        let (heads, head) = (
            fields.number("mamba_num_heads")?,
            fields.number("mamba_head_dim")?,
        );
        let numbers = fields.number("ssm_state_size")?;
        Ok(Self {
            channels: heads * head,
            groups: fields.number("n_groups")?,
            group_channels: 2 * numbers,
            inputs: fields.number("conv_kernel")? - 1,
            heads,
            head_numbers: head * numbers,
            dtype: match fields.text("mamba_ssm_cache_dtype")? {
                Some(name) => super::model::dtype("mamba_ssm_cache_dtype", name)?,
                None => KvDtype::Float32,
            },
        })
    }

    /// Gated delta net, as in Qwen3-Next and Qwen3.5.
    pub fn delta_net(fields: &Fields) -> Result<Self, SizeError> {
        let (key_heads, heads) = (
            fields.number("linear_num_key_heads")?,
            fields.number("linear_num_value_heads")?,
        );
        let (key, value) = (
            fields.number("linear_key_head_dim")?,
            fields.number("linear_value_head_dim")?,
        );
        Ok(Self {
            channels: 2 * key_heads * key + heads * value,
            groups: 0,
            group_channels: 0,
            inputs: fields.number("linear_conv_kernel_dim")? - 1,
            heads,
            head_numbers: key * value,
            dtype: match fields.text("mamba_ssm_dtype")? {
                Some(name) => super::model::dtype("mamba_ssm_dtype", name)?,
                None => KvDtype::Auto,
            },
        })
    }

    /// Bytes on one of `tp` ranks, in a model of type `model`.
    pub fn rank_bytes(&self, tp: u32, model: KvDtype) -> Result<u64, SizeError> {
        let ranks = u64::from(tp);
        let groups = match self.groups.is_multiple_of(ranks) {
            true => self.groups,
            false => ranks,
        };
        let channels = self.channels + groups * self.group_channels;
        if !channels.is_multiple_of(ranks) || !self.heads.is_multiple_of(ranks) {
            return Err(SizeError::BadTensorParallel {
                what: format!("the state ({channels} channels, {} heads)", self.heads),
                tp,
            });
        }
        let dtype = match self.dtype {
            KvDtype::Auto => model,
            dtype => dtype,
        };
        let convolution = channels / ranks * self.inputs * model.bytes();
        let recurrent = (self.heads / ranks).saturating_mul(self.head_numbers) * dtype.bytes();
        Ok(convolution.saturating_add(recurrent))
    }
}
