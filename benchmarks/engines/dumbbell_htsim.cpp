// The bench's dumbbell in htsim (github.com/Broadcom/csg-htsim): NewReno flows that share a drop-tail queue and
// a pipe, their acknowledgements another queue and pipe. Arguments: flows, milliseconds. Last line: packets
// delivered, CPU seconds of the run, goodput in Gb/s.
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <iostream>
#include <vector>

#include "eventlist.h"
#include "network.h"
#include "pipe.h"
#include "queue.h"
#include "tcp.h"

int main(int, char** argv) {
    int flows = atoi(argv[1]);
    double ms = atof(argv[2]);
    std::cout.setstate(std::ios_base::failbit);  // it tells of every timeout
    EventList& events = EventList::getTheEventList();
    events.setEndtime(timeFromMs(ms));
    Packet::set_packet_size(1500);
    linkspeed_bps rate = speedFromMbps((uint64_t)10000);
    Queue forth(rate, 1000 * 1500, events, NULL), back(rate, 1000 * 1500, events, NULL);
    Pipe out(timeFromUs((uint32_t)50), events), home(timeFromUs((uint32_t)50), events);
    TcpRtxTimerScanner scanner(timeFromMs(10), events);
    std::vector<TcpSink*> sinks;
    for (int i = 0; i < flows; i++) {
        TcpSrc* source = new TcpSrc(NULL, NULL, events);
        TcpSink* sink = new TcpSink();
        source->_ssthresh = 0xffffffff;
        scanner.registerTcp(*source);
        Route* there = new Route();
        there->push_back(&forth);
        there->push_back(&out);
        there->push_back(sink);
        Route* again = new Route();
        again->push_back(&back);
        again->push_back(&home);
        again->push_back(source);
        source->connect(*there, *again, *sink, timeFromUs((uint32_t)i));
        sinks.push_back(sink);
    }
    clock_t begin = clock();
    while (events.doNextEvent()) {
    }
    double seconds = double(clock() - begin) / CLOCKS_PER_SEC;
    double bytes = 0, useful = 0;
    for (TcpSink* sink : sinks) {
        bytes += sink->_packets;
        useful += sink->_cumulative_ack;
    }
    printf("\n%.0f %.6f %.4f\n", bytes / 1500, seconds, useful * 8 / ms / 1e6);
}
