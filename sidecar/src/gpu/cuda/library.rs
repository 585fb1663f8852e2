//! A library of NVIDIA's, which comes from the node with the driver or not at all: opened when it is asked for.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_void};
use std::mem::transmute_copy;
use std::ptr::NonNull;

/// An opened library. It stays open: drivers have threads of their own.
pub struct Library(NonNull<c_void>);

impl Library {
    /// Opens it; fails with what the loader says.
    pub fn open(name: &CStr) -> Result<Self, String> {
        // SAFETY: the name is a C string; what the library's constructors do is NVIDIA's, as in every program that uses a GPU.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        NonNull::new(handle).map(Self).ok_or_else(|| {
            // SAFETY: dlerror keeps a text for each thread, until the next call there.
            let text = unsafe { libc::dlerror() };
            if text.is_null() {
                return "dlopen failed".to_owned();
            }
            // SAFETY: dlerror gave a C string.
            unsafe { CStr::from_ptr(text) }
                .to_string_lossy()
                .into_owned()
        })
    }

    /// A function of the library; fails with its name where there is none.
    ///
    /// # Safety
    /// `F` is the type of the C function of that name.
    pub unsafe fn function<F: Copy>(&self, name: &'static CStr) -> Result<F, &'static str> {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
        // SAFETY: the handle is that of an open library, the name a C string.
        let found = unsafe { libc::dlsym(self.0.as_ptr(), name.as_ptr()) };
        if found.is_null() {
            return Err(name.to_str().unwrap_or("?"));
        }
        // SAFETY: an address is as large as a function pointer, and the caller vouches for the type behind it.
        Ok(unsafe { transmute_copy(&found) })
    }
}

// SAFETY: a handle of an open library may be used on any thread.
unsafe impl Send for Library {}
