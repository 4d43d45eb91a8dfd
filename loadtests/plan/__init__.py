"""`kvroute plan`: the cost model as tables for a person planning a fleet."""
