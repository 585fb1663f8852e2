//! The report as text.

use super::gpu::Gpu;
use super::host::Host;
use super::report::{Facts, Report};
use crate::cli::status::size;
use std::fmt::{Result, Write};

pub fn render(report: &Report) -> String {
    let mut out = String::new();
    // Writing to a String cannot fail.
    let _ = write(&mut out, report);
    out
}

fn write(out: &mut String, report: &Report) -> Result {
    host(out, &report.facts.host)?;
    facilities(out, &report.facts)?;
    gpu(out, &report.facts.gpu)?;
    section(out, "transfer")?;
    for mode in &report.transfer_modes {
        let reasons = match mode.reasons.is_empty() {
            true => String::new(),
            false => format!(" ({})", mode.reasons.join(", ")),
        };
        let text = format!("{}{reasons}: {}", name(mode.state), mode.detail);
        row(out, &format!("{:?}", mode.name), &text)?;
    }
    speeds(out, &report.facts)?;
    section(out, "why is this node slow")?;
    if report.findings.is_empty() {
        writeln!(out, "  no problems found")?;
    }
    for finding in &report.findings {
        let weight = name(finding.weight);
        writeln!(out, "  {weight:<9} {}: {}", finding.name, finding.message)?;
        writeln!(out, "            {}", finding.advice)?;
    }
    let verdict = match report.serves {
        true => "a sidecar can serve here",
        false => "a sidecar cannot serve here",
    };
    writeln!(out, "\n{verdict}")
}

fn section(out: &mut String, title: &str) -> Result {
    let gap = if out.is_empty() { "" } else { "\n" };
    writeln!(out, "{gap}{title}")
}

fn row(out: &mut String, name: &str, text: &str) -> Result {
    writeln!(out, "  {name:<16} {text}")
}

/// A name as words: `notTried` becomes `not tried`.
fn name(name: impl std::fmt::Debug) -> String {
    let mut words = String::new();
    for letter in format!("{name:?}").chars() {
        if letter.is_uppercase() && !words.is_empty() {
            words.push(' ');
        }
        words.extend(letter.to_lowercase());
    }
    words
}

fn known(bytes: Option<u64>) -> String {
    bytes.map_or("unknown".into(), size)
}

fn host(out: &mut String, host: &Host) -> Result {
    section(out, "host")?;
    row(out, "kernel", &host.kernel)?;
    row(out, "cpu", &host.cpu)?;
    let quota = match host.cpu_quota_cores {
        Some(quota) => format!("CPU limit {quota:.2}"),
        None => "no CPU limit".into(),
    };
    let cores = format!("{} of {}, {quota}", host.cores, host.node_cores);
    row(out, "cores", &cores)?;
    let load = host.load.map_or("unknown".into(), |load| {
        format!("{load:.1} threads over the last minute")
    });
    row(out, "load", &load)?;
    let reach: Vec<String> = host.numa_reach.iter().map(u32::to_string).collect();
    let numa = match reach.is_empty() {
        true => host.numa_nodes.to_string(),
        false => format!(
            "{}, this process may use {}",
            host.numa_nodes,
            reach.join(", ")
        ),
    };
    row(out, "NUMA nodes", &numa)?;
    let memory = format!(
        "{} available of {}, {} left to this process",
        known(host.memory_available_bytes),
        known(host.memory_total_bytes),
        size(host.memory_room_bytes)
    );
    row(out, "memory", &memory)?;
    let limit = match (host.memory_limit_bytes, host.memory_used_bytes) {
        (Some(limit), Some(used)) => format!("{}, {} used", size(limit), size(used)),
        _ => "none".into(),
    };
    row(out, "cgroup limit", &limit)?;
    row(out, "/dev/shm", &known(host.dev_shm_bytes))?;
    for pages in &host.huge_pages {
        let text = format!("{} free of {}", pages.free, pages.total);
        row(out, &format!("pages of {}", size(pages.page_bytes)), &text)?;
    }
    row(out, "shmem THP", &host.shmem_huge_pages)
}

fn facilities(out: &mut String, facts: &Facts) -> Result {
    section(out, "facilities")?;
    for facility in &facts.facilities {
        let text = match facility.works {
            true => format!("yes: {}", facility.detail),
            false => format!("no, {}: {}", facility.reason, facility.detail),
        };
        row(out, &format!("{:?}", facility.name), &text)?;
    }
    Ok(())
}

fn gpu(out: &mut String, gpu: &Gpu) -> Result {
    section(out, "GPU")?;
    if let Some(reason) = gpu.reason {
        row(out, "none usable", &format!("{reason:?}: {}", gpu.detail))?;
    }
    if !gpu.cuda.is_empty() {
        let driver = match gpu.driver.as_str() {
            "" => "version unknown",
            version => version,
        };
        row(out, "driver", &format!("{driver}, CUDA {}", gpu.cuda))?;
    }
    if !gpu.no_management.is_empty() {
        row(out, "no NVML", &gpu.no_management)?;
    }
    for device in &gpu.devices {
        let link = device.link.map_or(String::new(), |link| {
            format!(
                ", PCIe {} x{} of {} x{}",
                link.generation, link.width, link.generation_max, link.width_max
            )
        });
        let numa = device
            .numa_node
            .map_or(String::new(), |node| format!(", NUMA node {node}"));
        let limits = device.limits.iter().map(|limit| format!(", {limit:?}"));
        let text = format!(
            "{}, {} free of {}, compute {}, mode {}{link}{numa}{}",
            device.uuid,
            known(device.memory_free_bytes),
            size(device.memory_total_bytes),
            device.compute_capability,
            device.compute_mode,
            limits.collect::<String>()
        );
        row(out, &device.name, &text)?;
    }
    Ok(())
}

fn speeds(out: &mut String, facts: &Facts) -> Result {
    section(out, "bytes a second")?;
    let measured = facts.speeds.iter().filter(|s| s.bytes_per_second.is_some());
    let over = measured.map(|speed| speed.over_bytes).min();
    if let (Some(over), Some(cache)) = (over, facts.host.cache_bytes)
        && cache > over
    {
        row(
            out,
            "measured over",
            &format!(
                "{}, which may fit into this CPU's cache of {}",
                size(over),
                size(cache)
            ),
        )?;
    }
    for speed in &facts.speeds {
        let found = match speed.bytes_per_second {
            Some(bytes) => format!("{:>6.2} GB/s", bytes as f64 / 1e9),
            None => format!("not measured, {}", speed.reason),
        };
        let text = format!("{found}  bounds {}", speed.bounds);
        row(out, &format!("{:?}", speed.name), &text)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::doctor::gpu::{Device, DeviceLimit};
    use crate::cli::doctor::{findings, modes};
    use kvcachepool_gpu::cuda::management::Link;

    fn text(gpu: Gpu, host: Host) -> String {
        let facts = Facts {
            wanted: None,
            host,
            facilities: Vec::new(),
            gpu,
            speeds: Vec::new(),
        };
        let findings = findings::judged(&facts);
        render(&Report {
            version: String::new(),
            serves: findings::serves(&findings),
            transfer_modes: modes::judged(&facts.gpu, &facts.facilities, &facts.speeds),
            facts,
            findings,
        })
    }

    #[test]
    fn a_node_that_says_nothing_has_a_table_all_the_same() {
        let text = text(Gpu::default(), Host::default());
        assert!(text.starts_with("host\n  kernel"), "{text}");
        assert!(
            text.contains("memory           unknown available"),
            "{text}"
        );
        assert!(text.ends_with("\na sidecar can serve here\n"), "{text}");
    }

    #[test]
    fn devices_and_ways_stand_in_it_with_their_names() {
        let device = Device {
            name: "Some GPU".into(),
            uuid: "GPU-1".into(),
            memory_total_bytes: 80 << 30,
            compute_capability: "9.0".into(),
            compute_mode: "ExclusiveProcess".into(),
            link: Some(Link {
                generation: 1,
                generation_max: 5,
                width: 8,
                width_max: 16,
            }),
            numa_node: Some(1),
            limits: vec![DeviceLimit::ExclusiveProcess],
            ..Device::default()
        };
        let gpu = Gpu {
            cuda: "12.8".into(),
            no_management: "no libnvidia-ml.so.1".into(),
            devices: vec![device],
            ..Gpu::default()
        };
        let text = text(gpu, Host::default());
        for line in [
            "  driver           version unknown, CUDA 12.8\n",
            "  no NVML          no libnvidia-ml.so.1\n",
            "  Some GPU         GPU-1, unknown free of 80Gi, compute 9.0, mode ExclusiveProcess, PCIe 1 x8 of 5 x16, NUMA node 1, ExclusiveProcess\n",
            "  Engine           not tried: copies run in vLLM's process",
            "  CudaWindow       unavailable (ExclusiveProcess): a window in device memory",
        ] {
            assert!(text.contains(line), "{text}");
        }
    }
}
