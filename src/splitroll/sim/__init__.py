"""A fleet on a virtual clock: the same allocator and policies, engines that only take time."""
