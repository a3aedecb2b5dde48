"""What everything costs in seconds: operators, their launches on the host, and collectives.

Three sources, the better one first: a measured `DeviceProfile` of the device (exact operators, then
interpolation of the ratio of measured to modelled time), else a roofline with efficiency curves by kind of
operator. Every constant of the models stands in `roofline` with the source that it was taken from.
"""
