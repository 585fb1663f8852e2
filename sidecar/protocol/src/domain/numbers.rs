//! The number format of blocks, from layout descriptors.

use super::{Descriptor, SectionPlan};
use crate::object::{Axis, Dim, Element, Form};
use serde_json::Value;

/// The form of the blocks, if the layout gives the same one for all groups.
pub(super) fn form(layout: &Descriptor, plan: &SectionPlan) -> Form {
    let layout = layout.to_value();
    let groups = list(&layout, "groups");
    let mut elements = groups.iter().flat_map(|group| {
        let tensors = list(group, "tensors").iter();
        tensors.map(|tensor| {
            let dtype = tensor.get("dtype").and_then(Value::as_str);
            dtype.map(Element::of_torch).unwrap_or_default()
        })
    });
    let first = elements.next().unwrap_or_default();
    if !elements.all(|element| element == first) {
        return Form::default();
    }
    let mut forms = groups.iter().map(|group| dims(list(group, "form")));
    let dims = forms.next().flatten().unwrap_or_default();
    let same = forms.all(|other| other.as_ref() == Some(&dims));
    let form = Form::new(first, &dims).filter(|form| {
        let bytes = form.block_bytes().map(u64::from);
        let mut plans = plan.groups().iter();
        same && plans.all(|group| bytes == Some(group.block_bytes))
    });
    form.unwrap_or(Form::flat(first))
}

/// Parses dimensions of a block, e.g. `[["layer", 2], ["token", 16], ["channel", 128]]`.
fn dims(list: &[Value]) -> Option<Vec<Dim>> {
    let dim = |value: &Value| {
        let [axis, size] = value.as_array()?.as_slice() else {
            return None;
        };
        Some(Dim {
            axis: Axis::named(axis.as_str()?)?,
            size: u32::try_from(size.as_u64()?).ok()?,
        })
    };
    list.iter().map(dim).collect()
}

fn list<'a>(value: &'a Value, key: &str) -> &'a [Value] {
    let list = value.get(key).and_then(Value::as_array);
    list.map(Vec::as_slice).unwrap_or_default()
}
