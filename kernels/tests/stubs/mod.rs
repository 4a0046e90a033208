//! Stand-ins for CUDA libraries, compiled when a test runs, so that what a machine lacks can be tried
//! on any machine.
#![expect(clippy::print_stdout, reason = "a test that is skipped says so")]

use std::path::Path;
use std::process::Command;

/// C of a driver that knows its version, how it starts and `devices` devices.
pub(crate) fn driver(cuda_version: i32, init: i32, devices: i32) -> String {
    // Attributes by number (CUdevice_attribute): 13 clock, 16 multiprocessors, 36 memory clock, 37 bus
    // width, 75 and 76 compute capability.
    format!(
        r#"
int cuInit(unsigned flags) {{ return {init}; }}
int cuDriverGetVersion(int *version) {{ *version = {cuda_version}; return 0; }}
int cuDeviceGetCount(int *count) {{ *count = {devices}; return 0; }}
int cuDeviceGet(int *device, int ordinal) {{ *device = ordinal; return 0; }}
int cuDeviceGetName(char *name, int length, int device) {{
  const char *is = "Stub H200";
  int i = 0;
  for (; is[i] && i + 1 < length; i++) name[i] = is[i];
  name[i] = 0;
  return 0;
}}
int cuDeviceGetPCIBusId(char *bus, int length, int device) {{
  const char *is = "0000:00:00.0";
  for (int i = 0; i <= 12; i++) bus[i] = is[i];
  bus[6] += device;
  return 0;
}}
int cuDeviceGetP2PAttribute(int *value, int attribute, int from, int to) {{
  // 2: access; 3: native atomics, from the first device only.
  *value = attribute == 2 || (attribute == 3 && from == 0);
  return 0;
}}
int cuDeviceTotalMem_v2(unsigned long *bytes, int device) {{ *bytes = 150754820096ul; return 0; }}
int cuDeviceGetAttribute(int *value, int attribute, int device) {{
  switch (attribute) {{
    case 13: *value = 1980000; return 0;
    case 16: *value = 132; return 0;
    case 36: *value = 3201000; return 0;
    case 37: *value = 6144; return 0;
    case 75: *value = 9; return 0;
    case 76: *value = 0; return 0;
    default: return 1;
  }}
}}
"#
    )
}

/// Whether stubs can be compiled. Where they cannot, the test that asked passes without having tested;
/// `MOEFOLD_REQUIRE=stubs` makes that a failure.
pub(crate) fn can_compile() -> bool {
    let found = Command::new("cc").arg("--version").output();
    if found.is_ok_and(|output| output.status.success()) {
        return true;
    }
    let required = std::env::var("MOEFOLD_REQUIRE").unwrap_or_default();
    assert!(
        !required.split(',').any(|what| what == "stubs"),
        "MOEFOLD_REQUIRE names stubs, and there is no C compiler (cc)"
    );
    println!("skipped: no C compiler (cc) to build stub libraries with");
    false
}

/// Compiles C into `folder/name`, a library that calls itself `name`.
pub(crate) fn compile(folder: &Path, name: &str, source: &str) {
    let code = folder.join(format!("{name}.c"));
    std::fs::write(&code, source).expect("the temporary folder is writable");
    let output = Command::new("cc")
        .args(["-shared", "-fPIC", "-w", "-o"])
        .arg(folder.join(name))
        .arg(&code)
        .arg(format!("-Wl,-soname,{name}"))
        .output()
        .expect("cc starts");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}
