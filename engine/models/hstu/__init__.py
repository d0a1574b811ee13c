"""HSTU in its three published families."""
