"""The bench's dumbbell in ns-3's Python bindings (ns3 on PyPI), run by the interpreter that has them.

Arguments: flows, seconds. Last line: packets delivered, CPU seconds of the run. SACK is off: with it ns-3
takes several times as long.
"""

import sys
import time

from ns import ns  # type: ignore[import-not-found]

flows, seconds = int(sys.argv[1]), float(sys.argv[2])
for name, value in (
    ("ns3::TcpSocketBase::Sack", ns.BooleanValue(False)),
    ("ns3::TcpSocket::DelAckCount", ns.UintegerValue(1)),
    ("ns3::TcpSocket::SegmentSize", ns.UintegerValue(1448)),
    ("ns3::TcpSocket::SndBufSize", ns.UintegerValue(1 << 24)),
    ("ns3::TcpSocket::RcvBufSize", ns.UintegerValue(1 << 24)),
    ("ns3::TcpL4Protocol::SocketType", ns.TypeIdValue(ns.TypeId.LookupByName("ns3::TcpNewReno"))),
):
    ns.Config.SetDefault(name, value)
hosts = ns.NodeContainer()
hosts.Create(2)
wire = ns.PointToPointHelper()
wire.SetDeviceAttribute("DataRate", ns.StringValue("10Gbps"))
wire.SetChannelAttribute("Delay", ns.StringValue("50us"))
wire.SetQueue("ns3::DropTailQueue<Packet>", "MaxSize", ns.StringValue("1000p"))
devices = wire.Install(hosts)
ns.InternetStackHelper().Install(hosts)
addresses = ns.Ipv4AddressHelper()
addresses.SetBase(ns.Ipv4Address("10.0.0.0"), ns.Ipv4Mask("255.255.255.0"))
faces = addresses.Assign(devices)
sinks = []
for flow in range(flows):
    to = ns.InetSocketAddress(faces.GetAddress(1), 1024 + flow).ConvertTo()
    ns.BulkSendHelper("ns3::TcpSocketFactory", to).Install(hosts.Get(0)).Start(ns.Time(f"{flow}us"))
    sink = ns.PacketSinkHelper("ns3::TcpSocketFactory", to).Install(hosts.Get(1))
    sinks.append(ns.DynamicCast[ns.PacketSink](sink.Get(0)))
ns.Simulator.Stop(ns.Seconds(seconds))
begin = time.process_time()
ns.Simulator.Run()
spent = time.process_time() - begin
print(sum(sink.GetTotalRx() for sink in sinks) / 1448, spent)
