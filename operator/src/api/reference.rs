//! Generates the reference of the resource as Markdown, from the schema and the rules.

use super::{crd, rules};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    JSONSchemaProps, JSONSchemaPropsOrArray,
};
use std::fmt::Write;

const HEAD: &str = "# KVCachePool (kvcachepool.io/v1alpha1)

Every field of a `KVCachePool`, generated from the schema by
`cargo run -p kvcachepool-operator --example generate`. `kubectl explain kvcachepool.spec` shows the
same texts.

The smallest pool:

```yaml
apiVersion: kvcachepool.io/v1alpha1
kind: KVCachePool
metadata: {name: llama}
spec: {local: {memory: {perPod: 64Gi}}}
```

A pod of the same namespace with the label `kvcachepool.io/pool: llama` gets a cache.

- The API server checks the rules. The operator checks them again and reports a violation in the
  condition `Accepted`. [Troubleshooting](../guides/troubleshooting.md#conditions-of-a-pool)
  explains its reasons.
- Sizes are whole numbers with Ki, Mi, Gi, Ti, k, M, G or T, or without a unit (bytes).
- Times have the units h, m, s and ms, the largest first. There is no unit for days: 30 days are
  720h.
";

/// The content of `docs/reference/api.md`.
pub fn reference() -> String {
    let mut page = HEAD.to_string();
    for version in crd().spec.versions {
        let root = version.schema.and_then(|s| s.open_api_v3_schema);
        for (name, section) in root.and_then(|r| r.properties).into_iter().flatten() {
            if ["spec", "status"].contains(&name.as_str()) {
                add_section(&mut page, &name, &section);
            }
        }
    }
    page
}

/// Adds a section and its subsections, each as a table of its fields.
fn add_section(page: &mut String, path: &str, section: &JSONSchemaProps) {
    // Writing to a String cannot fail.
    let _ = writeln!(page, "\n## {path}");
    let of_section = rules().iter().filter(|rule| rule.at == path);
    let rows: String = of_section
        .map(|rule| format!("| {}. |\n", rule.message))
        .collect();
    if !rows.is_empty() {
        *page += &format!("\n| rule |\n|---|\n{rows}");
    }
    *page += "\n| field | type | default | meaning |\n|---|---|---|---|\n";
    let required = section.required.as_deref().unwrap_or_default();
    for (name, field) in section.properties.iter().flatten() {
        let at = format!("{path}.{name}");
        let default = match &field.default {
            Some(value) if !value.0.is_object() => format!("`{}`", value.0).replace('"', ""),
            None if required.contains(name) => "required".to_string(),
            _ => String::new(),
        };
        let mut meaning = one_line(field.description.as_deref().unwrap_or_default());
        if !has_table(field) {
            for rule in rules().iter().filter(|rule| rule.at == at) {
                let _ = write!(meaning, " Rule: {}.", rule.message);
            }
        }
        let _ = writeln!(
            page,
            "| `{name}` | {} | {default} | {meaning} |",
            kind(field)
        );
    }
    for (name, field) in section.properties.iter().flatten() {
        match list_of(field) {
            Some(item) if has_table(item) => add_section(page, &format!("{path}.{name}[]"), item),
            None if has_table(field) => add_section(page, &format!("{path}.{name}"), field),
            _ => {}
        }
    }
}

/// Whether the fields of a schema get a table. Fields of Kubernetes' own types are documented by Kubernetes.
fn has_table(schema: &JSONSchemaProps) -> bool {
    let mut fields = schema.properties.iter().flatten();
    fields.any(|(_, field)| field.description.is_some())
}

fn list_of(schema: &JSONSchemaProps) -> Option<&JSONSchemaProps> {
    match &schema.items {
        Some(JSONSchemaPropsOrArray::Schema(item)) => Some(item),
        _ => None,
    }
}

fn kind(schema: &JSONSchemaProps) -> String {
    if schema.x_kubernetes_int_or_string == Some(true) {
        return "size".to_string();
    }
    if let Some(values) = &schema.enum_ {
        let names: Vec<_> = values.iter().filter_map(|v| v.0.as_str()).collect();
        return names.join(", ");
    }
    let kind = schema.type_.as_deref().unwrap_or("any");
    if schema.additional_properties.is_some() {
        return "map".to_string();
    }
    match list_of(schema) {
        Some(item) => format!("list of {}", item.type_.as_deref().unwrap_or("any")),
        None => kind.to_string(),
    }
}

fn one_line(text: &str) -> String {
    text.split_whitespace()
        .collect::<Vec<_>>()
        .join(" ")
        .replace('|', "\\|")
}
