//! [`Version`]: the releases of Megatron-Core whose flags are known.

moefold_profiles::named! {
    /// A release of Megatron-Core and the Megatron-LM of its time. Which flag came when is read off the
    /// configuration classes of the packages 0.14.0, 0.15.0 and 0.16.1, and for `main` off Megatron-LM at d98e8a64.
    #[derive(Default)]
    pub enum Version {
        /// 0.14.
        V14 = "0.14",
        /// 0.15.
        V15 = "0.15",
        /// 0.16.
        #[default]
        V16 = "0.16",
        /// Main of August 2026, and what the branch dev had by then.
        Main = "main",
    }
}
