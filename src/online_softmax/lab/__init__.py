"""The lab: what shows, measures and explains the kernels. Nothing in the library imports it."""
