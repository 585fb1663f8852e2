//! Findings about GPUs, their driver, and the way between them and the host.

use super::findings::{Rule, finding, gigabytes};
use super::gpu::{DeviceLimit, GpuReason};
use super::report::{Facts, Finding, SpeedName, Weight};
use kvcachepool_gpu::cuda::management::Link;

/// Each is asked once.
pub const RULES: &[Rule] = &[
    driver,
    no_management,
    old_driver,
    narrow,
    old_link,
    slow,
    far,
];

/// Copies of page-locked memory get four fifths of what a link could carry, or more; below this share something is in their way.
const LINK_SHARE_MIN: f64 = 0.5;

fn driver(facts: &Facts) -> Option<Finding> {
    let reason = facts.gpu.reason.filter(|reason| !reason.is_absence())?;
    let advice = match reason {
        GpuReason::SystemNotReady => {
            "no process can use the GPUs before that: start nvidia-fabricmanager, of the driver's version, or look into its log"
        }
        GpuReason::DriverMismatch => {
            "restart a node whose driver was updated; leave compat libraries out of the container"
        }
        _ => {
            "vLLM on this node's GPU probably fares no better: look at the driver and at the container's CUDA libraries"
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
    let advice = "no window in device memory is made without it: NVIDIA_DRIVER_CAPABILITIES must name utility, too; after an update of the \
                  driver restart the node";
    finding(Weight::Note, "NoManagementLibrary", why.clone(), advice)
}

fn old_driver(facts: &Facts) -> Option<Finding> {
    let mut limits = facts.gpu.devices.iter().flat_map(|device| &device.limits);
    limits.find(|limit| **limit == DeviceLimit::DriverTooOld)?;
    let message = format!("the driver speaks CUDA {}", facts.gpu.cuda);
    let advice = "from 12.8 on the connector hands all copies of a job to the driver in one call";
    finding(Weight::Slows, "DriverTooOld", message, advice)
}

fn narrow(facts: &Facts) -> Option<Finding> {
    let is_narrow = |link: Link| link.width < link.width_max;
    let mut devices = facts.gpu.devices.iter();
    let device = devices.find(|device| device.link.is_some_and(is_narrow))?;
    let (name, link) = (&device.name, device.link?);
    let (now, most) = (link.width, link.width_max);
    let message = format!("{name} has {now} of {most} PCIe lanes");
    let advice = "loads and stores get that share of the speed: seat the card anew, look at riser and slot, and at the kernel's log for PCIe errors";
    finding(Weight::Slows, "LinkNarrow", message, advice)
}

/// Only of a device that has just copied: on an idle one the generation is lowered.
fn old_link(facts: &Facts) -> Option<Finding> {
    facts.speed(SpeedName::PinnedToDevice)?;
    // What is measured is the first device.
    let device = facts.gpu.devices.first()?;
    let link = device.link?;
    if link.generation >= link.generation_max {
        return None;
    }
    let (now, most) = (link.generation, link.generation_max);
    let name = &device.name;
    let message = format!("{name} copies over PCIe {now}, and PCIe {most} is possible");
    let advice = "each generation is half as fast as the next: look at the BIOS's settings of the slot, and at the kernel's log for PCIe errors";
    finding(Weight::Slows, "LinkGenerationLow", message, advice)
}

fn slow(facts: &Facts) -> Option<Finding> {
    // What is measured is the first device.
    let device = facts.gpu.devices.first()?;
    let most = device.link.and_then(bytes_per_second)?;
    let ways = [SpeedName::PinnedToDevice, SpeedName::PinnedFromDevice];
    let slowest = ways.iter().filter_map(|way| facts.speed(*way)).min()?;
    if slowest as f64 >= LINK_SHARE_MIN * most {
        return None;
    }
    let message = format!(
        "copies between host and {} run at {:.1} GB/s, its link could carry {:.1}",
        device.name,
        gigabytes(slowest),
        most / 1e9
    );
    let advice = "a vLLM that serves beside it, an IOMMU that translates, a NUMA node that is far (see the rows of GPU and host), or a virtual machine";
    finding(Weight::Slows, "GpuCopySlow", message, advice)
}

fn far(facts: &Facts) -> Option<Finding> {
    let reach = &facts.host.numa_reach;
    let mut devices = facts.gpu.devices.iter();
    let far = |node: u32| !reach.is_empty() && !reach.contains(&node);
    let device = devices.find(|device| device.numa_node.is_some_and(far))?;
    let message = format!(
        "{} hangs on NUMA node {}, and this process may run on no core of it",
        device.name, device.numa_node?
    );
    let advice = "copies cross the link between sockets: let the kubelet place pods by topologyManagerPolicy single-numa-node or restricted";
    finding(Weight::Slows, "GpuFar", message, advice)
}

/// What the best link that is possible carries one way, by the bits of a lane and their encoding (8b/10b, from PCIe 3 on 128b/130b); none
/// of a generation that is not known here.
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
