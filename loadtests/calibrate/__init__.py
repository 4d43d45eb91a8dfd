"""`kvroute calibrate`: how long the steps of a live engine take, seen from outside."""
