//! Findings about GPUs, their driver, and the connection to the host.

use super::findings::{Rule, finding, gigabytes};
use super::gpu::{DeviceLimit, GpuReason};
use super::report::{Facts, Finding, SpeedName, Weight};
use kvcachepool_gpu::cuda::management::Link;

/// Each rule runs once.
pub const RULES: &[Rule] = &[
    driver,
    no_management,
    old_driver,
    narrow,
    old_link,
    slow,
    far,
];

/// Copies of page-locked memory reach four fifths or more of the link's bandwidth; below this share something slows them down.
const LINK_SHARE_MIN: f64 = 0.5;

fn driver(facts: &Facts) -> Option<Finding> {
    let reason = facts.gpu.reason.filter(|reason| !reason.is_absence())?;
    let advice = match reason {
        GpuReason::SystemNotReady => {
            "no process can use the GPUs until the machine is ready: start nvidia-fabricmanager in the driver's version, or check its log"
        }
        GpuReason::DriverMismatch => {
            "restart the node if its driver was updated, and remove CUDA compat libraries from the container"
        }
        _ => {
            "vLLM probably cannot use this node's GPU either: check the driver and the container's CUDA libraries"
        }
    };
    let detail = facts.gpu.detail.clone();
    finding(Weight::Note, &format!("{reason:?}"), detail, advice)
}

fn no_management(facts: &Facts) -> Option<Finding> {
    let why = &facts.gpu.no_management;
    if facts.gpu.reason.is_some() || why.is_empty() {
        return None;
    }
    let advice = "windows in device memory need it: add utility to NVIDIA_DRIVER_CAPABILITIES; after an update of the \
                  driver restart the node";
    finding(Weight::Note, "NoManagementLibrary", why.clone(), advice)
}

fn old_driver(facts: &Facts) -> Option<Finding> {
    let mut limits = facts.gpu.devices.iter().flat_map(|device| &device.limits);
    limits.find(|limit| **limit == DeviceLimit::DriverTooOld)?;
    let message = format!("the driver supports CUDA {}", facts.gpu.cuda);
    let advice = "update the driver: from CUDA 12.8 on, the connector passes all copies of a job in one call";
    finding(Weight::Slows, "DriverTooOld", message, advice)
}

fn narrow(facts: &Facts) -> Option<Finding> {
    let is_narrow = |link: Link| link.width < link.width_max;
    let mut devices = facts.gpu.devices.iter();
    let device = devices.find(|device| device.link.is_some_and(is_narrow))?;
    let (name, link) = (&device.name, device.link?);
    let (now, most) = (link.width, link.width_max);
    let message = format!("{name} has {now} of {most} PCIe lanes");
    let advice = "loads and stores reach only that share of the speed: reseat the card, check riser and slot, and check the kernel log for PCIe errors";
    finding(Weight::Slows, "LinkNarrow", message, advice)
}

/// Only for a device that has just copied: an idle device lowers its PCIe generation.
fn old_link(facts: &Facts) -> Option<Finding> {
    facts.speed(SpeedName::PinnedToDevice)?;
    // Only the first device is measured.
    let device = facts.gpu.devices.first()?;
    let link = device.link?;
    if link.generation >= link.generation_max {
        return None;
    }
    let (now, most) = (link.generation, link.generation_max);
    let name = &device.name;
    let message = format!("{name} copies over PCIe {now}, but supports PCIe {most}");
    let advice = "each generation is half as fast as the next: check the BIOS settings of the slot, and the kernel log for PCIe errors";
    finding(Weight::Slows, "LinkGenerationLow", message, advice)
}

fn slow(facts: &Facts) -> Option<Finding> {
    // Only the first device is measured.
    let device = facts.gpu.devices.first()?;
    let most = device.link.and_then(bytes_per_second)?;
    let ways = [SpeedName::PinnedToDevice, SpeedName::PinnedFromDevice];
    let slowest = ways.iter().filter_map(|way| facts.speed(*way)).min()?;
    if slowest as f64 >= LINK_SHARE_MIN * most {
        return None;
    }
    let message = format!(
        "copies between host and {} run at {:.1} GB/s, but its link supports {:.1}",
        device.name,
        gigabytes(slowest),
        most / 1e9
    );
    let advice = "possible causes: a vLLM that serves at the same time, IOMMU translation, a remote NUMA node (see the GPU and host rows), or a virtual machine";
    finding(Weight::Slows, "GpuCopySlow", message, advice)
}

fn far(facts: &Facts) -> Option<Finding> {
    let reach = &facts.host.numa_reach;
    let mut devices = facts.gpu.devices.iter();
    let far = |node: u32| !reach.is_empty() && !reach.contains(&node);
    let device = devices.find(|device| device.numa_node.is_some_and(far))?;
    let message = format!(
        "{} is attached to NUMA node {}, and this process may not use any of its cores",
        device.name, device.numa_node?
    );
    let advice = "copies cross the link between sockets: set the kubelet's topologyManagerPolicy to single-numa-node or restricted";
    finding(Weight::Slows, "GpuFar", message, advice)
}

/// One-way bandwidth of the best link that the device supports, from the bits of a lane and their encoding (8b/10b, from PCIe 3 on
/// 128b/130b); `None` for an unknown generation.
fn bytes_per_second(link: Link) -> Option<f64> {
    let lane = match link.generation_max {
        1 => 0.25e9,
        2 => 0.5e9,
        3 => 0.985e9,
        4 => 1.969e9,
        5 => 3.938e9,
        _ => return None,
    };
    Some(lane * f64::from(link.width_max))
}
