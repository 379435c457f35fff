"""How fast and how lean the ops and models are beside other implementations of the same mathematics."""
