"""Linux as the capabilities need it: processes, namespaces, links, control groups, BPF."""
