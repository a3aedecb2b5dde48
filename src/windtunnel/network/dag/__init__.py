"""Computing and sending planned as one graph (MXDAG, HotNets 2021)."""
