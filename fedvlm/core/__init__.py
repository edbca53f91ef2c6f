"""The types that all else uses, and the interfaces of adapter, local rule, merge and metric."""
