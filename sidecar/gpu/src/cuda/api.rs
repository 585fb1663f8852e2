//! The functions of `cuda.h` in use: those for windows, and those for kernels and measurements. Every result is a `CUresult`, 0 for
//! success.
#![allow(unsafe_code)]

use super::library::Library;
use crate::device::DeviceError;
use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};

/// A context, stream or event: a pointer that is opaque to callers.
pub type Opaque = *mut c_void;
/// `CUdeviceptr`.
pub type DevicePtr = u64;
/// `CUmemGenericAllocationHandle`.
pub type Allocation = u64;

/// `CUmemLocation`, of type device (1).
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Location {
    pub kind: c_int,
    pub id: c_int,
}

/// `CUmemAllocationProp`: pinned (1), exportable as a POSIX descriptor (1).
#[repr(C)]
pub struct AllocationProp {
    pub kind: c_int,
    pub handle_types: c_int,
    pub location: Location,
    pub win32: *mut c_void,
    pub flags: [u8; 8],
}

/// `CUmemAccessDesc`: read and write (3).
#[repr(C)]
pub struct AccessDesc {
    pub location: Location,
    pub flags: c_int,
}

/// `CUipcMemHandle`.
pub const IPC_HANDLE_BYTES: usize = 64;

/// `CUresult`s that are handled separately.
pub const OUT_OF_MEMORY: c_int = 2;
pub const DEVICE_UNAVAILABLE: c_int = 46;
pub const NO_DEVICE: c_int = 100;
pub const NOT_READY: c_int = 600;
pub const ALREADY_REGISTERED: c_int = 712;

/// The driver cannot load the PTX.
pub const INVALID_IMAGE: c_int = 200;
pub const NO_BINARY_FOR_DEVICE: c_int = 209;
pub const INVALID_PTX: c_int = 218;
pub const NO_PTX_COMPILER: c_int = 221;
pub const UNSUPPORTED_PTX_VERSION: c_int = 222;
pub const PTX_COMPILER_OFF: c_int = 223;

/// `CUipcMemHandle`, which is passed by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct IpcHandle(pub [u8; IPC_HANDLE_BYTES]);

macro_rules! functions {
    ($(#[$of:meta])* $table:ident: $($field:ident = $symbol:literal ($($arg:ty),*);)+) => {
        $(#[$of])*
        pub struct $table {
            $(pub $field: unsafe extern "C" fn($($arg),*) -> c_int),+
        }

        impl $table {
            /// Fails with the name of the missing function.
            pub fn of(library: &Library) -> Result<Self, &'static str> {
                // SAFETY: the types match these symbols in cuda.h: CUdevice is an int, handles are pointers or 64-bit words.
                unsafe {
                    Ok(Self { $($field: library.function($symbol)?),+ })
                }
            }
        }
    };
}

functions! {
    /// Functions that windows need, grouped by purpose.
    Api:
    init = "cuInit" (c_uint);
    device_count = "cuDeviceGetCount" (*mut c_int);
    device_get = "cuDeviceGet" (*mut c_int, c_int);
    device_name = "cuDeviceGetName" (*mut c_char, c_int, c_int);
    device_uuid = "cuDeviceGetUuid_v2" (*mut u8, c_int);
    device_attribute = "cuDeviceGetAttribute" (*mut c_int, c_int, c_int);
    context_retain = "cuDevicePrimaryCtxRetain" (*mut Opaque, c_int);
    context_release = "cuDevicePrimaryCtxRelease_v2" (c_int);
    context_set = "cuCtxSetCurrent" (Opaque);
    priorities = "cuCtxGetStreamPriorityRange" (*mut c_int, *mut c_int);
    stream_create = "cuStreamCreateWithPriority" (*mut Opaque, c_uint, c_int);
    stream_synchronize = "cuStreamSynchronize" (Opaque);
    stream_query = "cuStreamQuery" (Opaque);
    stream_destroy = "cuStreamDestroy_v2" (Opaque);
    event_create = "cuEventCreate" (*mut Opaque, c_uint);
    event_record = "cuEventRecord" (Opaque, Opaque);
    event_query = "cuEventQuery" (Opaque);
    event_destroy = "cuEventDestroy_v2" (Opaque);
    copy_in = "cuMemcpyHtoD_v2" (DevicePtr, *const c_void, usize);
    copy_out = "cuMemcpyDtoH_v2" (*mut c_void, DevicePtr, usize);
    copy_in_async = "cuMemcpyHtoDAsync_v2" (DevicePtr, *const c_void, usize, Opaque);
    copy_out_async = "cuMemcpyDtoHAsync_v2" (*mut c_void, DevicePtr, usize, Opaque);
    register = "cuMemHostRegister_v2" (*mut c_void, usize, c_uint);
    granularity = "cuMemGetAllocationGranularity" (*mut usize, *const AllocationProp, c_int);
    create = "cuMemCreate" (*mut Allocation, usize, *const AllocationProp, c_ulonglong);
    release = "cuMemRelease" (Allocation);
    export = "cuMemExportToShareableHandle" (*mut c_void, Allocation, c_int, c_ulonglong);
    reserve = "cuMemAddressReserve" (*mut DevicePtr, usize, usize, DevicePtr, c_ulonglong);
    unreserve = "cuMemAddressFree" (DevicePtr, usize);
    map = "cuMemMap" (DevicePtr, usize, usize, Allocation, c_ulonglong);
    unmap = "cuMemUnmap" (DevicePtr, usize);
    set_access = "cuMemSetAccess" (DevicePtr, usize, *const AccessDesc, usize);
    memory = "cuMemGetInfo_v2" (*mut usize, *mut usize);
    alloc = "cuMemAlloc_v2" (*mut DevicePtr, usize);
    free = "cuMemFree_v2" (DevicePtr);
    ipc_handle = "cuIpcGetMemHandle" (*mut u8, DevicePtr);
}

functions! {
    /// Functions that only kernels, tests and measurements need.
    Compute:
    version = "cuDriverGetVersion" (*mut c_int);
    context_synchronize = "cuCtxSynchronize" ();
    module_load = "cuModuleLoadDataEx" (*mut Opaque, *const c_void, c_uint, *mut c_int, *mut *mut c_void);
    module_unload = "cuModuleUnload" (Opaque);
    function = "cuModuleGetFunction" (*mut Opaque, Opaque, *const c_char);
    launch = "cuLaunchKernel" (Opaque, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Opaque, *mut *mut c_void, *mut *mut c_void);
    copy_within_async = "cuMemcpyDtoDAsync_v2" (DevicePtr, DevicePtr, usize, Opaque);
    unregister = "cuMemHostUnregister" (*mut c_void);
    import = "cuMemImportFromShareableHandle" (*mut Allocation, *mut c_void, c_int);
    ipc_open = "cuIpcOpenMemHandle_v2" (*mut DevicePtr, IpcHandle, c_uint);
    ipc_close = "cuIpcCloseMemHandle" (DevicePtr);
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
