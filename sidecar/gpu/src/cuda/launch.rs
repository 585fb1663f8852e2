//! Kernels from the PTX of the crate `kernels`, loaded into a context: implements [`Device`] for that crate's launchers. For tests,
//! benchmarks and the doctor; a serving sidecar runs no kernel.
#![allow(unsafe_code)]

use super::api::{
    Failed, INVALID_IMAGE, INVALID_PTX, NO_BINARY_FOR_DEVICE, NO_PTX_COMPILER, PTX_COMPILER_OFF,
    UNSUPPORTED_PTX_VERSION, done,
};
use super::buffer::Buffer;
use super::context::Context;
use super::stream::Stream;
use cudarc::driver::sys::{CUdeviceptr, CUfunction, CUmodule};
use kvcachepool_kernels::launch::{self, Device, Refused, Value};
use kvcachepool_kernels::manifest::{Count, Entry, Manifest};
use std::collections::HashMap;
use std::ffi::{CString, c_int, c_void};
use std::ptr::null_mut;
use std::sync::Arc;

/// Why a kernel was not launched.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LaunchError {
    /// The manifest is invalid, or names a module whose PTX is not in this binary.
    #[error("the launch manifest of this build is invalid: {0}")]
    Manifest(String),
    #[error("no kernel is named {0}")]
    UnknownKernel(String),
    /// The memory or stream belongs to another device than the kernels.
    #[error("the kernels are loaded on {own}, but their memory or stream is on {other}")]
    OtherDevice { own: String, other: String },
    /// The driver is older than the PTX. Copies and the CPU references do not need it.
    #[error(
        "the driver does not know PTX {version} of the module {module}: a driver of CUDA 12.0 or newer does"
    )]
    PtxTooNew { module: String, version: String },
    /// The device is older than the PTX's target.
    #[error("the device is older than the target of the module {module} ({flags})")]
    DeviceTooOld {
        module: String,
        /// Flags of the nvcc call.
        flags: String,
    },
    /// The driver's PTX compiler is missing or disabled.
    #[error(
        "the driver cannot compile PTX here ({0}): libnvidia-ptxjitcompiler is missing or disabled"
    )]
    NoPtxCompiler(Failed),
    /// The driver refuses the PTX of this build.
    #[error("the driver refuses the PTX of the module {module}: {failed}")]
    PtxRefused { module: String, failed: Failed },
    /// Invalid arguments, or memory shorter than the kernel accesses.
    #[error(transparent)]
    Refused(#[from] Refused),
    #[error(transparent)]
    Driver(#[from] Failed),
}

impl LaunchError {
    /// Stable name for reports.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Manifest(_) => "Manifest",
            Self::UnknownKernel(_) => "UnknownKernel",
            Self::OtherDevice { .. } => "OtherDevice",
            Self::PtxTooNew { .. } => "PtxTooNew",
            Self::DeviceTooOld { .. } => "DeviceTooOld",
            Self::NoPtxCompiler(_) => "NoPtxCompiler",
            Self::PtxRefused { .. } => "PtxRefused",
            Self::Refused(refused) => refused.name(),
            Self::Driver(_) => "DriverFailed",
        }
    }
}

/// The kernels of this build, loaded into a device's context.
pub struct Kernels {
    functions: HashMap<String, (Entry, CUfunction)>,
    modules: Vec<CUmodule>,
    context: Arc<Context>,
}

// SAFETY: modules and functions may be used from any thread; every call makes the context current first.
unsafe impl Send for Kernels {}
// SAFETY: as above; the fields do not change.
unsafe impl Sync for Kernels {}

impl Kernels {
    /// Compiles and loads all modules.
    pub fn load(context: &Arc<Context>) -> Result<Self, LaunchError> {
        context.enter()?;
        let compute = context.compute()?;
        let manifest = Manifest::load().map_err(|e| LaunchError::Manifest(e.to_string()))?;
        let mut this = Self {
            functions: HashMap::new(),
            modules: Vec::new(),
            context: context.clone(),
        };
        for module in &manifest.modules {
            let text = module.ptx().and_then(|ptx| CString::new(ptx).ok());
            let ptx =
                text.ok_or_else(|| LaunchError::Manifest(format!("no {}.ptx", module.name)))?;
            let mut handle = null_mut();
            // SAFETY: a pointer to a local handle, a C string, and no options.
            let loaded = unsafe {
                (compute.module_load)(&mut handle, ptx.as_ptr().cast(), 0, null_mut(), null_mut())
            };
            done("cuModuleLoadDataEx", loaded)
                .map_err(|failed| refused(&manifest, &module.name, failed, context.capability()))?;
            this.modules.push(handle);
            for entry in &module.entries {
                let name = CString::new(entry.name.as_str())
                    .map_err(|e| LaunchError::Manifest(e.to_string()))?;
                let mut function = null_mut();
                // SAFETY: a pointer to a local handle, a loaded module, a C string.
                let found = unsafe { (compute.function)(&mut function, handle, name.as_ptr()) };
                done("cuModuleGetFunction", found)?;
                let known = (entry.clone(), function);
                this.functions.insert(entry.name.clone(), known);
            }
        }
        Ok(this)
    }

    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Rejects memory of another device. Kernels would not fault reliably: with peer access they would use that memory.
    fn same_device(&self, other: &Arc<Context>) -> Result<(), LaunchError> {
        match Arc::ptr_eq(&self.context, other) {
            true => Ok(()),
            false => Err(LaunchError::OtherDevice {
                own: self.context.name.clone(),
                other: other.name.clone(),
            }),
        }
    }
}

// SAFETY: ranges belong to allocations of this context, buffers wait for the device before they are freed, and functions are launched
// according to the manifest.
unsafe impl Device for Kernels {
    type Memory = Buffer;
    type Stream = Stream;
    type Error = LaunchError;

    fn upload(&self, bytes: &[u8]) -> Result<Buffer, LaunchError> {
        Ok(Buffer::of(&self.context, bytes)?)
    }

    fn range(&self, memory: &Buffer) -> Result<(CUdeviceptr, u64), LaunchError> {
        self.same_device(memory.context())?;
        Ok((memory.at(0, memory.bytes())?, memory.bytes()))
    }

    unsafe fn launch(
        &self,
        stream: &Stream,
        kernel: &str,
        arguments: &[(&str, Value)],
        of: impl Fn(Count) -> u64,
    ) -> Result<(), LaunchError> {
        let unknown = || LaunchError::UnknownKernel(kernel.to_owned());
        let (entry, function) = self.functions.get(kernel).ok_or_else(unknown)?;
        self.same_device(stream.context())?;
        let mut words = launch::words(entry, arguments)?;
        let mut pointers: Vec<*mut c_void> =
            words.iter_mut().map(|w| (&raw mut *w).cast()).collect();
        let [x, y] = entry.grid_of(of);
        let [threads_x, threads_y] = entry.block;
        self.context.enter()?;
        // SAFETY: the function takes the parameters in the manifest, which tests compare with the sources. Each pointer is to a word of
        // that type, and the driver has read them when it returns. The caller guarantees the memory behind the arguments.
        let launched = unsafe {
            (self.context.compute()?.launch)(
                *function,
                x,
                y,
                1,
                threads_x,
                threads_y,
                1,
                entry.shared_bytes,
                stream.raw(),
                pointers.as_mut_ptr(),
                null_mut(),
            )
        };
        Ok(done("cuLaunchKernel", launched)?)
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        self.context.settle();
        if let Ok(compute) = self.context.compute() {
            for module in &self.modules {
                // SAFETY: the module was loaded here, and none of its kernels runs any more.
                unsafe { (compute.module_unload)(*module) };
            }
        }
    }
}

/// Why a module was not loaded on a device of this capability.
fn refused(manifest: &Manifest, module: &str, failed: Failed, capability: c_int) -> LaunchError {
    let module = module.to_owned();
    let target = |flag: &String| flag.strip_prefix("-arch=compute_")?.parse::<c_int>().ok();
    let target = manifest.flags.iter().find_map(target).unwrap_or(0);
    match failed.result {
        // drivers also report PTX for newer devices as invalid
        INVALID_PTX if 0 < capability && capability < target => LaunchError::DeviceTooOld {
            module,
            flags: manifest.flags.join(" "),
        },
        UNSUPPORTED_PTX_VERSION => LaunchError::PtxTooNew {
            module,
            version: manifest.ptx_version.clone(),
        },
        NO_BINARY_FOR_DEVICE => LaunchError::DeviceTooOld {
            module,
            flags: manifest.flags.join(" "),
        },
        NO_PTX_COMPILER | PTX_COMPILER_OFF => LaunchError::NoPtxCompiler(failed),
        INVALID_IMAGE | INVALID_PTX => LaunchError::PtxRefused { module, failed },
        _ => LaunchError::Driver(failed),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ptx_that_is_not_loaded_has_a_name() {
        let manifest = Manifest::load().unwrap();
        for (result, capability, name) in [
            (UNSUPPORTED_PTX_VERSION, 90, "PtxTooNew"),
            (NO_BINARY_FOR_DEVICE, 90, "DeviceTooOld"),
            (NO_PTX_COMPILER, 90, "NoPtxCompiler"),
            (PTX_COMPILER_OFF, 90, "NoPtxCompiler"),
            (INVALID_PTX, 80, "PtxRefused"),
            (INVALID_PTX, 75, "DeviceTooOld"),
            (INVALID_PTX, 0, "PtxRefused"),
            (2, 90, "DriverFailed"),
        ] {
            let call = "cuModuleLoadDataEx";
            let error = refused(&manifest, "pages", Failed { call, result }, capability);
            assert_eq!(error.name(), name, "{error}");
        }
    }
}
