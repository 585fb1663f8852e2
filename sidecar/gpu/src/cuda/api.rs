//! The functions of `cuda.h` in use: those for windows, those for kernels and measurements, and those for the doctor. Types and constants
//! are cudarc's. Its functions are not: they panic when the driver lacks one.
#![allow(unsafe_code)]

use super::library::Library;
use crate::device::DeviceError;
use cudarc::driver::sys::*;
use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};

/// `CUresult`s that are handled separately. `INVALID_VALUE` and `NOT_FOUND` are also given for what cannot be passed to the driver.
pub const INVALID_VALUE: c_int = CUresult::CUDA_ERROR_INVALID_VALUE as c_int;
pub const OUT_OF_MEMORY: c_int = CUresult::CUDA_ERROR_OUT_OF_MEMORY as c_int;
pub const DEVICE_UNAVAILABLE: c_int = CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE as c_int;
pub const NO_DEVICE: c_int = CUresult::CUDA_ERROR_NO_DEVICE as c_int;
pub const NOT_FOUND: c_int = CUresult::CUDA_ERROR_NOT_FOUND as c_int;
pub const NOT_READY: c_int = CUresult::CUDA_ERROR_NOT_READY as c_int;
pub const ALREADY_REGISTERED: c_int = CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED as c_int;
pub const UNKNOWN: c_int = CUresult::CUDA_ERROR_UNKNOWN as c_int;

/// The driver cannot load the PTX.
pub const INVALID_IMAGE: c_int = CUresult::CUDA_ERROR_INVALID_IMAGE as c_int;
pub const NO_BINARY_FOR_DEVICE: c_int = CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU as c_int;
pub const INVALID_PTX: c_int = CUresult::CUDA_ERROR_INVALID_PTX as c_int;
pub const NO_PTX_COMPILER: c_int = CUresult::CUDA_ERROR_JIT_COMPILER_NOT_FOUND as c_int;
pub const UNSUPPORTED_PTX_VERSION: c_int = CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION as c_int;
pub const PTX_COMPILER_OFF: c_int = CUresult::CUDA_ERROR_JIT_COMPILATION_DISABLED as c_int;

/// Not ordered with the default stream.
pub const NON_BLOCKING: c_uint = CUstream_flags::CU_STREAM_NON_BLOCKING as c_uint;

macro_rules! functions {
    ($(#[$of:meta])* $table:ident: $($field:ident = $symbol:ident $(or $older:ident)? ($($arg:ty),*);)+) => {
        $(#[$of])*
        pub struct $table {
            // A driver may be newer than cudarc's list of results, and a Rust enum must not get a value that it does not list.
            $(pub $field: unsafe extern "C" fn($($arg),*) -> c_int),+
        }

        // A line that differs from cudarc's declaration of the symbol does not compile.
        $(const _: &[unsafe fn($($arg),*) -> CUresult] = &[$symbol $(, $older)?];)+

        impl $table {
            /// Fails with the name of the missing function.
            pub fn of(library: &Library) -> Result<Self, &'static str> {
                // SAFETY: each type has the parameters of cudarc's declaration, and a result of the same size.
                unsafe {
                    Ok(Self {
                        $($field: library.function(stringify!($symbol))
                            $(.or_else(|_| library.function(stringify!($older))))??),+
                    })
                }
            }
        }
    };
}

const _: () = assert!(size_of::<CUresult>() == size_of::<c_int>());

functions! {
    /// Functions that windows need, grouped by purpose.
    Api:
    init = cuInit (c_uint);
    device_count = cuDeviceGetCount (*mut c_int);
    device_get = cuDeviceGet (*mut CUdevice, c_int);
    device_name = cuDeviceGetName (*mut c_char, c_int, CUdevice);
    device_uuid = cuDeviceGetUuid_v2 (*mut CUuuid, CUdevice);
    device_attribute = cuDeviceGetAttribute (*mut c_int, CUdevice_attribute, CUdevice);
    context_retain = cuDevicePrimaryCtxRetain (*mut CUcontext, CUdevice);
    context_release = cuDevicePrimaryCtxRelease_v2 (CUdevice);
    context_set = cuCtxSetCurrent (CUcontext);
    priorities = cuCtxGetStreamPriorityRange (*mut c_int, *mut c_int);
    stream_create = cuStreamCreateWithPriority (*mut CUstream, c_uint, c_int);
    stream_synchronize = cuStreamSynchronize (CUstream);
    stream_query = cuStreamQuery (CUstream);
    stream_destroy = cuStreamDestroy_v2 (CUstream);
    event_create = cuEventCreate (*mut CUevent, c_uint);
    event_record = cuEventRecord (CUevent, CUstream);
    event_query = cuEventQuery (CUevent);
    event_destroy = cuEventDestroy_v2 (CUevent);
    copy_in = cuMemcpyHtoD_v2 (CUdeviceptr, *const c_void, usize);
    copy_out = cuMemcpyDtoH_v2 (*mut c_void, CUdeviceptr, usize);
    copy_in_async = cuMemcpyHtoDAsync_v2 (CUdeviceptr, *const c_void, usize, CUstream);
    copy_out_async = cuMemcpyDtoHAsync_v2 (*mut c_void, CUdeviceptr, usize, CUstream);
    register = cuMemHostRegister_v2 (*mut c_void, usize, c_uint);
    granularity = cuMemGetAllocationGranularity (*mut usize, *const CUmemAllocationProp, CUmemAllocationGranularity_flags);
    create = cuMemCreate (*mut CUmemGenericAllocationHandle, usize, *const CUmemAllocationProp, c_ulonglong);
    release = cuMemRelease (CUmemGenericAllocationHandle);
    export = cuMemExportToShareableHandle (*mut c_void, CUmemGenericAllocationHandle, CUmemAllocationHandleType, c_ulonglong);
    reserve = cuMemAddressReserve (*mut CUdeviceptr, usize, usize, CUdeviceptr, c_ulonglong);
    unreserve = cuMemAddressFree (CUdeviceptr, usize);
    map = cuMemMap (CUdeviceptr, usize, usize, CUmemGenericAllocationHandle, c_ulonglong);
    unmap = cuMemUnmap (CUdeviceptr, usize);
    set_access = cuMemSetAccess (CUdeviceptr, usize, *const CUmemAccessDesc, usize);
    memory = cuMemGetInfo_v2 (*mut usize, *mut usize);
    alloc = cuMemAlloc_v2 (*mut CUdeviceptr, usize);
    free = cuMemFree_v2 (CUdeviceptr);
    ipc_handle = cuIpcGetMemHandle (*mut CUipcMemHandle, CUdeviceptr);
}

functions! {
    /// Functions that only kernels, tests and measurements need.
    Compute:
    version = cuDriverGetVersion (*mut c_int);
    context_synchronize = cuCtxSynchronize ();
    module_load = cuModuleLoadDataEx (*mut CUmodule, *const c_void, c_uint, *mut CUjit_option, *mut *mut c_void);
    module_unload = cuModuleUnload (CUmodule);
    function = cuModuleGetFunction (*mut CUfunction, CUmodule, *const c_char);
    launch = cuLaunchKernel (CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, CUstream, *mut *mut c_void, *mut *mut c_void);
    copy_within_async = cuMemcpyDtoDAsync_v2 (CUdeviceptr, CUdeviceptr, usize, CUstream);
    unregister = cuMemHostUnregister (*mut c_void);
    import = cuMemImportFromShareableHandle (*mut CUmemGenericAllocationHandle, *mut c_void, CUmemAllocationHandleType);
    ipc_open = cuIpcOpenMemHandle_v2 (*mut CUdeviceptr, CUipcMemHandle, c_uint);
    ipc_close = cuIpcCloseMemHandle (CUdeviceptr);
}

functions! {
    /// Functions that need no context, which would take device memory: for the doctor.
    Query:
    init = cuInit (c_uint);
    version = cuDriverGetVersion (*mut c_int);
    device_count = cuDeviceGetCount (*mut c_int);
    device_get = cuDeviceGet (*mut CUdevice, c_int);
    device_name = cuDeviceGetName (*mut c_char, c_int, CUdevice);
    // The second version also returns UUIDs of MIG instances; drivers before CUDA 11.4 have only the first.
    device_uuid = cuDeviceGetUuid_v2 or cuDeviceGetUuid (*mut CUuuid, CUdevice);
    device_memory = cuDeviceTotalMem_v2 (*mut usize, CUdevice);
    device_attribute = cuDeviceGetAttribute (*mut c_int, CUdevice_attribute, CUdevice);
    device_bus = cuDeviceGetPCIBusId (*mut c_char, c_int, CUdevice);
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{call} failed with {result}")]
pub struct Failed {
    pub call: &'static str,
    /// Its `CUresult`.
    pub result: c_int,
}

impl From<Failed> for DeviceError {
    fn from(failed: Failed) -> Self {
        Self(failed.to_string())
    }
}

/// Converts the result of a named call.
pub fn done(call: &'static str, result: c_int) -> Result<(), Failed> {
    match result {
        0 => Ok(()),
        result => Err(Failed { call, result }),
    }
}
